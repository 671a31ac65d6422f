//! One answer under rules: a state machine over generated tokens whose parts are free, one of a few tokens, one of a few
//! texts, or JSON judged by llguidance. A draft tree is walked depth first; going back up undoes one token.

use std::sync::Arc;

use llguidance::Matcher;
use llguidance::toktrie::TokTrie;

use crate::engine::contract::Constraint;
use crate::server::chat_output::Markers;

/// A tool the model may call.
pub struct ToolRule {
    pub name: String,
    /// Its arguments; cloned for each call.
    pub arguments: Matcher,
}

/// What the answer must look like after the reasoning.
pub enum AnswerForm {
    /// Text, or calls of the tools, whose arguments are bound by their schemas.
    Free,
    /// JSON that the matcher accepts; or tool calls, if there are tools.
    Json(Box<Matcher>),
    /// Tool calls and nothing else.
    Calls,
}

/// The rules of a request's answers.
pub struct AnswerRules {
    pub markers: Option<Markers>,
    /// The prompt ended inside the reasoning.
    pub thinking: bool,
    pub form: AnswerForm,
    pub tools: Vec<ToolRule>,
    /// More than one call is allowed.
    pub parallel: bool,
    /// Index in the conversation of the first call.
    pub first_call: usize,
    /// Tokens that end the turn.
    pub ends: Vec<u32>,
}

/// Most calls of one answer; the section is closed after them.
const MAX_CALLS: usize = 64;

#[derive(Clone)]
enum Part {
    Reasoning,
    /// Free text, in which a tool section may begin.
    Content,
    /// Exactly one of these tokens comes next.
    Only(Vec<u32>),
    /// `functions.NAME:INDEX`, of which these bytes are written.
    CallId(Vec<u8>),
    Nothing,
}

/// Where the answer stands. `json` is some while JSON is being written; then `part` says nothing.
struct State {
    part: Part,
    json: Option<Box<Json>>,
    calls: usize,
}

struct Json {
    matcher: Matcher,
    /// Tokens written; before the first one a tool section may take the place of a JSON answer.
    written: usize,
    /// Arguments end with their marker, a JSON answer with the end of the turn.
    arguments: bool,
}

/// How to take back one token.
enum Undo {
    Matcher,
    State(State),
    Part(Part),
}

/// The constraint of one choice.
pub struct Answer {
    rules: Arc<AnswerRules>,
    trie: Arc<TokTrie>,
    vocab_size: usize,
    state: State,
}

#[cfg(test)]
mod tests;

impl Answer {
    pub fn new(rules: Arc<AnswerRules>, trie: Arc<TokTrie>, vocab_size: usize) -> Self {
        let state = State { part: Part::Reasoning, json: None, calls: 0 };
        let mut answer = Self { rules, trie, vocab_size, state };
        if !answer.rules.thinking {
            answer.state = answer.after_reasoning();
        }
        answer
    }

    fn after_reasoning(&self) -> State {
        let part = match (&self.rules.form, self.rules.markers) {
            (AnswerForm::Json(matcher), _) => {
                let json = Json { matcher: matcher.deep_clone(), written: 0, arguments: false };
                return State { part: Part::Nothing, json: Some(Box::new(json)), calls: 0 };
            }
            (AnswerForm::Calls, Some(markers)) => Part::Only(vec![markers.section_begin]),
            _ => Part::Content,
        };
        State { part, json: None, calls: 0 }
    }

    fn is_end(&self, token: u32) -> bool {
        self.rules.ends.contains(&token)
    }

    fn texts(&self) -> impl Iterator<Item = Vec<u8>> {
        let index = self.rules.first_call + self.state.calls;
        self.rules.tools.iter().map(move |tool| format!("functions.{}:{index}", tool.name).into_bytes())
    }

    /// Moves over one token. `None`: it is not allowed here, and nothing has changed.
    fn advance(&mut self, token: u32) -> Result<Option<Undo>, String> {
        if self.state.json.is_some() {
            return self.advance_json(token);
        }
        let Some(next) = self.after(token) else { return Ok(None) };
        Ok(Some(match next {
            Next::Same => Undo::Part(self.state.part.clone()),
            Next::Part(part) => Undo::Part(std::mem::replace(&mut self.state.part, part)),
            Next::State(state) => Undo::State(std::mem::replace(&mut self.state, state)),
        }))
    }

    fn advance_json(&mut self, token: u32) -> Result<Option<Undo>, String> {
        let ends_turn = self.is_end(token);
        let ends_call = self.rules.markers.is_some_and(|markers| markers.call_end == token);
        if let Some(markers) = self.rules.markers.filter(|markers| markers.section_begin == token && self.may_call_instead()) {
            let next = State { part: Part::Only(vec![markers.call_begin]), json: None, calls: 0 };
            return Ok(Some(Undo::State(std::mem::replace(&mut self.state, next))));
        }
        let Some(json) = &mut self.state.json else { return Ok(None) };
        let over = if json.arguments { ends_call } else { ends_turn };
        if over {
            if !json.matcher.is_accepting().map_err(|error| error.to_string())? {
                return Ok(None);
            }
            let (part, calls) = if json.arguments { (self.after_call(), self.state.calls + 1) } else { (Part::Nothing, 0) };
            let next = State { part, json: None, calls };
            return Ok(Some(Undo::State(std::mem::replace(&mut self.state, next))));
        }
        let taken = json.matcher.try_consume_tokens(&[token]).map_err(|error| error.to_string())?;
        json.written += taken;
        Ok((taken == 1).then_some(Undo::Matcher))
    }

    /// A JSON answer has not begun and there are tools to call instead.
    fn may_call_instead(&self) -> bool {
        !self.rules.tools.is_empty() && self.state.json.as_ref().is_some_and(|json| !json.arguments && json.written == 0)
    }

    /// What may follow a finished call.
    fn after_call(&self) -> Part {
        let Some(markers) = self.rules.markers else { return Part::Nothing };
        let another = self.rules.parallel && self.state.calls + 1 < MAX_CALLS;
        Part::Only(if another { vec![markers.call_begin, markers.section_end] } else { vec![markers.section_end] })
    }

    /// The next state outside JSON.
    fn after(&self, token: u32) -> Option<Next> {
        let markers = self.rules.markers;
        let is = |marker: fn(&Markers) -> u32| markers.as_ref().is_some_and(|markers| marker(markers) == token);
        match &self.state.part {
            Part::Reasoning => {
                if is(|m| m.think_end) {
                    return Some(Next::State(self.after_reasoning()));
                }
                self.after_free(token, !matches!(self.rules.form, AnswerForm::Free))
            }
            Part::Content => self.after_free(token, false),
            Part::Only(tokens) => {
                if !tokens.contains(&token) {
                    return None;
                }
                Some(Next::Part(if is(|m| m.section_begin) {
                    Part::Only(vec![markers?.call_begin])
                } else if is(|m| m.call_begin) {
                    Part::CallId(Vec::new())
                } else if is(|m| m.section_end) {
                    Part::Only(self.rules.ends.clone())
                } else {
                    Part::Nothing
                }))
            }
            Part::CallId(written) => self.after_id(written, token),
            Part::Nothing => self.is_end(token).then_some(Next::Same),
        }
    }

    /// In free text. `bound`: something must still come, so that the turn may not end here.
    fn after_free(&self, token: u32, bound: bool) -> Option<Next> {
        if self.is_end(token) {
            return (!bound).then_some(Next::Part(Part::Nothing));
        }
        let Some(markers) = self.rules.markers else { return Some(Next::Same) };
        if self.rules.tools.is_empty() {
            let opens = token == markers.section_begin || token == markers.call_begin;
            return (!opens).then_some(Next::Same);
        }
        match token {
            token if token == markers.section_begin => Some(Next::Part(Part::Only(vec![markers.call_begin]))),
            token if token == markers.call_begin => Some(Next::Part(Part::CallId(Vec::new()))),
            _ => Some(Next::Same),
        }
    }

    fn after_id(&self, written: &[u8], token: u32) -> Option<Next> {
        let markers = self.rules.markers?;
        if token == markers.argument_begin {
            let place = self.texts().position(|text| text == written)?;
            let json = Json { matcher: self.rules.tools[place].arguments.deep_clone(), written: 0, arguments: true };
            return Some(Next::State(State { part: Part::Nothing, json: Some(Box::new(json)), calls: self.state.calls }));
        }
        let more = [written, self.bytes(token)].concat();
        let fits = more.len() > written.len() && self.texts().any(|text| text.starts_with(&more));
        fits.then_some(Next::Part(Part::CallId(more)))
    }

    fn bytes(&self, token: u32) -> &[u8] {
        if (token as usize) < self.vocab_size { self.trie.token(token) } else { &[] }
    }

    fn undo(&mut self, undo: Undo) -> Result<(), String> {
        match undo {
            Undo::Part(part) => self.state.part = part,
            Undo::State(state) => self.state = state,
            Undo::Matcher => {
                if let Some(json) = &mut self.state.json {
                    json.written -= 1;
                    json.matcher.rollback(1).map_err(|error| error.to_string())?;
                }
            }
        }
        Ok(())
    }

    /// Writes the tokens allowed next; `mask` arrives zeroed.
    fn mask(&mut self, mask: &mut [u32]) -> Result<(), String> {
        if self.state.json.is_some() {
            return self.mask_json(mask);
        }
        match &self.state.part {
            Part::Reasoning | Part::Content => {
                set_all(mask, self.vocab_size);
                let bound = matches!(self.state.part, Part::Reasoning) && !matches!(self.rules.form, AnswerForm::Free);
                let markers = self.rules.markers.map(|m| vec![m.section_begin, m.call_begin]).unwrap_or_default();
                let ends = if bound { self.rules.ends.clone() } else { Vec::new() };
                for token in markers.into_iter().chain(ends) {
                    if self.after(token).is_none() {
                        clear(mask, token);
                    }
                }
            }
            Part::Only(tokens) => tokens.iter().for_each(|token| set(mask, *token)),
            Part::CallId(written) => {
                for text in self.texts() {
                    match text.strip_prefix(written.as_slice()) {
                        Some([]) => set(mask, self.rules.markers.map_or(0, |markers| markers.argument_begin)),
                        Some(rest) => self.trie.all_prefixes(rest).into_iter().for_each(|token| set(mask, token)),
                        None => {}
                    }
                }
            }
            Part::Nothing => self.rules.ends.iter().for_each(|token| set(mask, *token)),
        }
        Ok(())
    }

    fn mask_json(&mut self, mask: &mut [u32]) -> Result<(), String> {
        let instead = self.rules.markers.filter(|_| self.may_call_instead());
        let Some(json) = &mut self.state.json else { return Ok(()) };
        let over = json.matcher.is_accepting().map_err(|error| error.to_string())?;
        if !json.matcher.is_stopped() {
            let allowed = json.matcher.compute_mask().map_err(|error| error.to_string())?;
            for (word, bits) in mask.iter_mut().zip(allowed.as_slice()) {
                *word |= bits;
            }
        }
        // The matcher allows its own end token where JSON is complete; which token ends this part is ours to say.
        self.rules.ends.iter().for_each(|token| clear(mask, *token));
        if let Some(markers) = instead {
            set(mask, markers.section_begin);
        }
        if over && json.arguments {
            set(mask, self.rules.markers.map_or(0, |markers| markers.call_end));
        } else if over {
            self.rules.ends.iter().for_each(|token| set(mask, *token));
        }
        Ok(())
    }

    /// Masks of `row` and, after one step down each, of its children.
    fn visit(&mut self, row: usize, tree: &Tree, masks: &mut [u32]) -> Result<(), String> {
        self.mask(&mut masks[row * tree.words..(row + 1) * tree.words])?;
        for child in row + 1..tree.tokens.len() {
            if usize::from(tree.parents[child]) != row {
                continue;
            }
            match self.advance(tree.tokens[child])? {
                Some(undo) => {
                    self.visit(child, tree, masks)?;
                    self.undo(undo)?;
                }
                None => fill_unreachable(child, tree, masks),
            }
        }
        Ok(())
    }
}

enum Next {
    Same,
    Part(Part),
    State(State),
}

struct Tree<'a> {
    tokens: &'a [u32],
    parents: &'a [u8],
    words: usize,
}

/// A row whose token is not allowed, and all below it, can never be reached: anything goes there.
fn fill_unreachable(row: usize, tree: &Tree, masks: &mut [u32]) {
    let mut dead = vec![false; tree.tokens.len()];
    dead[row] = true;
    for below in row..tree.tokens.len() {
        if dead[below] || (below > row && dead[usize::from(tree.parents[below])]) {
            dead[below] = true;
            masks[below * tree.words..(below + 1) * tree.words].fill(u32::MAX);
        }
    }
}

fn set(mask: &mut [u32], token: u32) {
    if let Some(word) = mask.get_mut(token as usize / 32) {
        *word |= 1 << (token % 32);
    }
}

fn clear(mask: &mut [u32], token: u32) {
    if let Some(word) = mask.get_mut(token as usize / 32) {
        *word &= !(1 << (token % 32));
    }
}

fn set_all(mask: &mut [u32], vocab_size: usize) {
    let whole = (vocab_size / 32).min(mask.len());
    mask[..whole].fill(u32::MAX);
    (whole * 32..vocab_size).for_each(|token| set(mask, token as u32));
}

impl Constraint for Answer {
    fn mask_tree(&mut self, tokens: &[u32], parents: &[u8], words: usize, masks: &mut [u32]) -> Result<(), String> {
        if tokens.is_empty() {
            return Ok(());
        }
        self.visit(0, &Tree { tokens, parents, words }, masks)
    }

    fn commit(&mut self, token: u32) -> Result<bool, String> {
        if self.advance(token)?.is_none() {
            return Err(format!("token {token} was emitted against the grammar"));
        }
        if let Some(json) = &self.state.json {
            return Ok(!json.arguments && json.matcher.is_stopped());
        }
        Ok(match &self.state.part {
            Part::Nothing => true,
            Part::Only(tokens) => tokens.iter().all(|token| self.is_end(*token)),
            _ => false,
        })
    }
}
