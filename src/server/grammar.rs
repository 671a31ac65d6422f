//! Compiles what a request demands of the form of its answer (JSON schema, tool arguments, forced tool calls) into a
//! [`Constraint`] the engine asks at every node of a draft tree.
//!
//! JSON is judged by llguidance; which part of the answer is under which rule (reasoning, content, tool section) is decided by
//! token ids in [`answer`].

mod answer;
mod limits;

use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Map, Value, json};

pub use answer::{AnswerForm, AnswerRules, ToolRule};

use crate::engine::contract::{Constraint, ModelInfo};
use crate::model::tokenizer::Tokenizer;

/// White space allowed between two JSON tokens of an answer: one space, or a line break and an indent; not an endless run, into which
/// a model can fall.
const LAYOUT: &str = r"\x20|\n\x20{0,16}";

/// The same in arguments of a call, which the template writes on one line.
const ONE_LINE: &str = r"\x20";

/// Compiles grammars over one vocabulary.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    end: u32,
    /// Built when first needed: for 163,840 tokens it takes a moment.
    factory: OnceLock<Result<Factory, String>>,
}

struct Factory {
    parsers: ParserFactory,
    trie: Arc<TokTrie>,
}

impl Grammars {
    pub fn new(tokenizer: Arc<Tokenizer>, info: &ModelInfo) -> Self {
        let end = info.stop_ids.first().copied().unwrap_or(0);
        Self { tokenizer, vocab_size: info.vocab_size, end, factory: OnceLock::new() }
    }

    fn factory(&self) -> Result<&Factory, String> {
        self.factory.get_or_init(|| self.build()).as_ref().map_err(Clone::clone)
    }

    fn build(&self) -> Result<Factory, String> {
        let words = (0..self.vocab_size as u32).map(|id| word(&self.tokenizer, id)).collect::<Vec<_>>();
        let trie = TokTrie::from(&TokRxInfo::new(self.vocab_size as u32, self.end), &words);
        // Which tokens spell a forced text is left to the model: masks then depend on nothing but the text so far.
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie.clone()));
        let mut parsers = ParserFactory::new_simple(&env).map_err(|error| error.to_string())?;
        parsers.quiet();
        parsers.limits_mut().verbose_errors = false;
        Ok(Factory { parsers, trie: Arc::new(trie) })
    }

    /// A matcher for JSON that fits `schema`. The error says what of the schema cannot be honoured.
    pub fn json(&self, schema: &Value) -> Result<Matcher, String> {
        self.matcher(schema, LAYOUT)
    }

    /// The same for the arguments of a tool call.
    pub fn arguments(&self, schema: &Value) -> Result<Matcher, String> {
        self.matcher(schema, ONE_LINE)
    }

    fn matcher(&self, schema: &Value, white_space: &str) -> Result<Matcher, String> {
        let mut schema = match schema {
            Value::Object(map) => map.clone(),
            Value::Bool(true) => Map::new(),
            Value::Bool(false) => return Err("the schema `false` admits nothing".into()),
            _ => return Err("a schema is an object".into()),
        };
        if let Some(excess) = limits::excess(&schema) {
            return Err(excess);
        }
        // Options of the matcher are ours to set, not the client's.
        schema.insert("x-guidance".into(), json!({"whitespace_pattern": white_space, "coerce_one_of": true}));
        let grammar = TopLevelGrammar::from_json_schema(Value::Object(schema));
        let mut matcher = Matcher::new(self.factory()?.parsers.create_parser(grammar));
        // Some schemas compile and admit nothing, or too much at once, which only their first mask tells.
        match matcher.get_error().or_else(|| matcher.compute_mask().err().map(|error| error.to_string())) {
            None => Ok(matcher),
            Some(error) => Err(match error.lines().next() {
                Some("NoExtensionBias") => "nothing fits it".to_owned(),
                why => why.unwrap_or("it cannot be compiled").to_owned(),
            }),
        }
    }

    /// The constraint of one choice; all choices of a request share its rules.
    pub fn constraint(&self, rules: impl Into<Arc<AnswerRules>>) -> Result<Box<dyn Constraint>, String> {
        Ok(Box::new(answer::Answer::new(rules.into(), self.factory()?.trie.clone(), self.vocab_size)))
    }
}

/// A token as llguidance knows it: its bytes, or for a special token its name behind a byte no text has.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    if tokenizer.is_special(id) { [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat() } else { bytes.to_vec() }
}
