//! The fields both generating routes share: how to sample, when to stop, how many choices. Every known field is done, or
//! refused by name; unknown fields are ignored.

use serde_json::{Value, json};

use crate::engine::contract::{Sampling, Stop};
use crate::server::config::ServerConfig;
use crate::server::error::ApiError;
use crate::server::fields::{Fields, shown, whole};
use crate::speculate::budget::Budget;

/// Most stop strings and stop ids of a request, and the longest stop string in bytes.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// Most entries of `logit_bias`, as OpenAI allows.
const MAX_BIASES: usize = 1024;
/// Most alternatives reported per token.
pub const MAX_TOP_LOGPROBS: i64 = 20;
/// Most log-probabilities of prompt tokens in one answer, which is held in memory until it is complete: about 200 bytes each.
const MAX_PROMPT_LOGPROBS: u64 = 4 << 20;
/// The same of generated tokens, about 250 bytes each with the JSON they become. An answer that is streamed holds none.
const MAX_LOGPROBS: u64 = 1 << 20;

/// What completions and chat have in common.
#[derive(Clone, Debug)]
pub struct Common {
    pub sampling: Sampling,
    /// As asked; each choice derives its own from it.
    pub seed: Option<u64>,
    pub stop: Stop,
    /// As asked, before it is cut to the room left.
    pub max_tokens: Option<u32>,
    pub min_tokens: u32,
    pub n: usize,
    pub budget: Option<Budget>,
    pub stream: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub trace: bool,
    pub prompt_logprobs: Option<u32>,
}

impl Common {
    pub fn parse(fields: Fields, vocab_size: usize, config: &ServerConfig) -> Result<Self, ApiError> {
        refuse_unsupported(fields)?;
        let stream = fields.bool("stream")?.unwrap_or(false);
        let (include_usage, continuous_usage) = stream_options(fields, stream)?;
        let max_tokens = match fields.count("max_completion_tokens")? {
            Some(newer) => {
                fields.count("max_tokens")?;
                Some(newer)
            }
            None => fields.count("max_tokens")?.or(config.default_max_tokens),
        };
        let min_tokens = fields.count("min_tokens")?.unwrap_or(0);
        if let Some(max) = max_tokens.filter(|max| min_tokens > *max) {
            return Err(ApiError::invalid(
                "min_tokens",
                format!("min_tokens = {min_tokens} is larger than max_tokens = {max}: wanted at most that."),
            ));
        }
        let prompt_logprobs = fields.integer("prompt_logprobs", 0..=MAX_TOP_LOGPROBS)?.map(|k| k as u32);
        if stream && prompt_logprobs.is_some() {
            return Err(ApiError::unsupported("prompt_logprobs", "prompt_logprobs is not supported with stream = true."));
        }
        let n = fields.integer("n", 1..=config.max_choices as i64)?.unwrap_or(1) as usize;
        let trace = fields.bool("trace")?.unwrap_or(false);
        if trace && !stream {
            return Err(ApiError::unsupported("trace", "trace = true is only supported with stream = true."));
        }
        Ok(Self {
            sampling: sampling(fields, vocab_size)?,
            seed: fields.seed("seed")?,
            stop: stop(fields, vocab_size)?,
            max_tokens,
            min_tokens,
            n,
            budget: budget(fields)?,
            stream,
            include_usage,
            continuous_usage,
            trace,
            prompt_logprobs,
        })
    }

    /// Tokens to generate after a prompt of `prompt` tokens: what was asked for, cut to the room left (agents ask for the whole
    /// context). No room for a single token is an overflow. `limit` = context, `slots` = KV capacity for one request.
    pub fn room(&self, prompt: usize, limit: usize, slots: usize) -> Result<u32, ApiError> {
        let asked = self.max_tokens.map_or(1, u64::from).max(1);
        if prompt >= limit {
            return Err(ApiError::context_length(prompt, asked, limit));
        }
        if prompt >= slots {
            return Err(ApiError::kv_capacity(prompt, asked, slots));
        }
        let room = u32::try_from(limit.min(slots) - prompt).unwrap_or(u32::MAX);
        if self.min_tokens > room {
            return Err(ApiError::context_length(prompt, u64::from(self.min_tokens), limit.min(slots)));
        }
        Ok(self.max_tokens.map_or(room, |asked| asked.clamp(1, room)))
    }

    /// Refuses more log-probabilities of prompt tokens than an answer can hold: `asked` alternatives beside each of `tokens` prompt
    /// tokens, for every choice.
    pub fn check_prompt_logprobs(&self, asked: Option<u32>, tokens: usize) -> Result<(), ApiError> {
        let Some(top) = asked else { return Ok(()) };
        let wanted = (tokens as u64).saturating_mul(self.n as u64).saturating_mul(u64::from(top) + 1);
        if wanted <= MAX_PROMPT_LOGPROBS {
            return Ok(());
        }
        let message = format!(
            "{wanted} log-probabilities of prompt tokens (prompt tokens times choices times alternatives) are too many: wanted at most \
             {MAX_PROMPT_LOGPROBS}."
        );
        Err(ApiError::invalid("prompt_logprobs", message))
    }

    /// Keeps the log-probabilities of generated tokens, `asked` alternatives beside each, within what an answer that is not streamed can
    /// hold. `rooms`: most tokens of a choice, by prompt; where the request leaves that open, they are cut. `param`: the field that asks.
    ///
    /// # Errors
    /// The request itself wants more.
    pub fn fit_logprobs(&self, param: &str, asked: Option<u32>, rooms: &mut [u32]) -> Result<(), ApiError> {
        let Some(top) = asked.filter(|_| !self.stream) else { return Ok(()) };
        let each = (self.n as u64).saturating_mul(u64::from(top) + 1);
        let wanted = rooms.iter().map(|&room| u64::from(room)).sum::<u64>().saturating_mul(each);
        if wanted <= MAX_LOGPROBS {
            return Ok(());
        }
        let cut = MAX_LOGPROBS / each.saturating_mul(rooms.len() as u64);
        if self.max_tokens.is_none() && cut >= u64::from(self.min_tokens.max(1)) {
            rooms.iter_mut().for_each(|room| *room = (*room).min(cut as u32));
            return Ok(());
        }
        let message = format!(
            "{wanted} log-probabilities of generated tokens (max_tokens times choices times alternatives and the token itself) are too many \
             for an answer in one piece: wanted at most {MAX_LOGPROBS}. Lower max_tokens, n or {param}, or set stream = true."
        );
        Err(ApiError::invalid(param, message))
    }

    /// The seed of choice `index`: the request's own for the first, mixed ones for the others.
    pub fn seed_of(&self, index: usize, random: impl FnOnce() -> u64) -> u64 {
        match self.seed {
            Some(seed) if index == 0 => seed,
            Some(seed) => mix(seed ^ mix(index as u64)),
            None => random(),
        }
    }
}

/// The finaliser of splitmix64: a bijection, so that distinct inputs stay distinct.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

fn sampling(fields: Fields, vocab_size: usize) -> Result<Sampling, ApiError> {
    let defaults = Sampling::greedy();
    let number = |name, range, default| fields.number(name, range).map(|value| value.unwrap_or(default));
    let top_p = number("top_p", 0.0..=1.0, 1.0)?;
    if top_p == 0.0 {
        return Err(ApiError::invalid("top_p", "top_p = 0 keeps no token: wanted more than 0 and at most 1 (temperature 0 is greedy)."));
    }
    // Smaller ones would divide a logit into infinity.
    let repetition_penalty = number("repetition_penalty", 0.01..=100.0, 1.0)?;
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?.unwrap_or(0);
    Ok(Sampling {
        temperature: temperature(number("temperature", 0.0..=100.0, 1.0)?),
        // The smallest share still keeps the best token.
        top_p: (top_p as f32).max(f32::MIN_POSITIVE),
        // Keeping as many as there are is keeping all.
        top_k: if top_k <= 0 || top_k >= vocab_size as i64 { 0 } else { top_k as u32 },
        min_p: number("min_p", 0.0..=1.0, 0.0)? as f32,
        frequency_penalty: number("frequency_penalty", -2.0..=2.0, 0.0)? as f32,
        presence_penalty: number("presence_penalty", -2.0..=2.0, 0.0)? as f32,
        repetition_penalty: repetition_penalty as f32,
        logit_bias: logit_bias(fields, vocab_size)?,
        ..defaults
    })
}

/// Below a millionth the best token takes everything (a logit difference of 1e-4 becomes e^-100), and smaller values would only
/// overflow the division.
fn temperature(asked: f64) -> f32 {
    if asked < 1e-6 { 0.0 } else { asked as f32 }
}

fn logit_bias(fields: Fields, vocab_size: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    if map.len() > MAX_BIASES {
        return Err(ApiError::invalid("logit_bias", format!("logit_bias has {} entries: wanted at most {MAX_BIASES}.", map.len())));
    }
    let entries = map.iter().map(|(key, value)| {
        let id = key.parse::<u32>().ok().filter(|id| (*id as usize) < vocab_size).ok_or_else(|| {
            let shown = shown(&Value::String(key.clone()));
            ApiError::invalid("logit_bias", format!("logit_bias key {shown}: wanted a token id from 0 to {}.", vocab_size - 1))
        })?;
        let bias = Fields::at(map, "logit_bias").number(key, -100.0..=100.0)?.unwrap_or(0.0);
        let _ = value;
        Ok((id, bias as f32))
    });
    entries.collect()
}

fn stop(fields: Fields, vocab_size: usize) -> Result<Stop, ApiError> {
    let strings = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(list)) => {
            let texts = list.iter().map(|item| item.as_str().map(str::to_owned).ok_or_else(|| fields.wrong("stop", item, "a string")));
            texts.collect::<Result<_, _>>()?
        }
        Some(other) => return Err(fields.wrong("stop", other, "a string or a list of strings")),
    };
    if strings.len() > MAX_STOPS {
        return Err(ApiError::invalid("stop", format!("stop has {} entries: wanted at most {MAX_STOPS}.", strings.len())));
    }
    if let Some(bad) = strings.iter().find(|text| text.is_empty() || text.len() > MAX_STOP_BYTES) {
        return Err(ApiError::invalid("stop", format!("stop holds a string of {} bytes: wanted 1 to {MAX_STOP_BYTES}.", bad.len())));
    }
    Ok(Stop {
        ids: stop_ids(fields, vocab_size)?,
        strings,
        ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
        include_in_output: fields.bool("include_stop_str_in_output")?.unwrap_or(false),
    })
}

fn stop_ids(fields: Fields, vocab_size: usize) -> Result<Vec<u32>, ApiError> {
    let list = fields.array("stop_token_ids")?.unwrap_or_default();
    if list.len() > MAX_STOPS {
        return Err(ApiError::invalid("stop_token_ids", format!("stop_token_ids has {} entries: wanted at most {MAX_STOPS}.", list.len())));
    }
    list.iter().map(|item| token_id(item, "stop_token_ids", vocab_size)).collect()
}

/// One token id of the vocabulary.
pub fn token_id(value: &Value, param: &str, vocab_size: usize) -> Result<u32, ApiError> {
    let id = whole(value).and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < vocab_size);
    id.ok_or_else(|| {
        let message =
            format!("{param} holds {}: wanted token ids from 0 to {} (the vocabulary has {vocab_size}).", shown(value), vocab_size - 1);
        ApiError::invalid(param, message)
    })
}

/// `speculation`: `off`, `chain`, `auto` or `tree:N`; absent = the server's setting.
fn budget(fields: Fields) -> Result<Option<Budget>, ApiError> {
    let Some(text) = fields.string("speculation")? else { return Ok(None) };
    text.parse().map(Some).map_err(|error| ApiError::invalid("speculation", format!("speculation: {error}")))
}

fn stream_options(fields: Fields, stream: bool) -> Result<(bool, bool), ApiError> {
    let Some(map) = fields.object("stream_options")? else { return Ok((false, false)) };
    let options = Fields::at(map, "stream_options");
    let include = options.bool("include_usage")?.unwrap_or(false);
    let continuous = options.bool("continuous_usage_stats")?.unwrap_or(false);
    // Without a stream the options have nothing to act on; clients that set them once for all calls are let through.
    Ok((stream && include, stream && continuous && include))
}

/// Fields of OpenAI's and vLLM's APIs that change the answer and are not done here. A neutral value is let through.
fn refuse_unsupported(fields: Fields) -> Result<(), ApiError> {
    let off = [json!(false)];
    let zero = [json!(0), json!(0.0)];
    let empty = [json!([]), json!({}), json!("")];
    let one = [json!(1), json!(1.0)];
    let rules: [(&str, &[Value], &str); 27] = [
        ("use_beam_search", &off, "there is no beam search"),
        ("length_penalty", &one, "there is no beam search"),
        ("early_stopping", &off, "there is no beam search"),
        ("truncate_prompt_tokens", &[], "prompts are never cut; shorten it"),
        ("skip_special_tokens", &[json!(true)], "special tokens never appear in text"),
        ("spaces_between_special_tokens", &[json!(true), json!(false)], "special tokens never appear in text"),
        ("allowed_token_ids", &empty, "use logit_bias or response_format"),
        ("bad_words", &empty, "use logit_bias"),
        ("logits_processors", &empty, "use logit_bias or response_format"),
        ("guided_json", &[], "use response_format with type json_schema"),
        ("guided_regex", &[], "use response_format with type json_schema"),
        ("guided_choice", &[], "use response_format with type json_schema and enum"),
        ("guided_grammar", &[], "use response_format with type json_schema"),
        ("structured_outputs", &[], "use response_format"),
        ("return_tokens_as_token_ids", &off, "token ids are not printed in place of text"),
        ("return_token_ids", &off, "token ids are not returned"),
        ("priority", &zero, "requests are served in order of arrival"),
        ("cache_salt", &empty, "prompts are not cached between requests"),
        ("kv_transfer_params", &[], "there is no KV transfer"),
        ("vllm_xargs", &empty, "there are no extra arguments"),
        ("thinking_token_budget", &[], "reasoning ends with max_tokens"),
        ("logits_processor", &[], "use logit_bias or response_format"),
        ("mm_processor_kwargs", &empty, "this server reads text only"),
        ("prompt_embeds", &[], "send text or token ids"),
        ("prompt_cache_retention", &[json!("in_memory")], "prompts are not cached between requests"),
        ("background", &off, "answers are not stored"),
        ("store", &off, "answers are not stored"),
    ];
    rules.iter().try_for_each(|(name, neutral, why)| fields.refuse_unless(name, neutral, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: usize = 4096;

    fn parse(body: Value) -> Result<Common, ApiError> {
        Common::parse(Fields::root(body.as_object().unwrap()), VOCAB, &ServerConfig::default())
    }

    #[test]
    fn border_values_are_accepted_and_what_is_beyond_is_refused_by_name() {
        for (field, good, bad) in [
            ("temperature", vec![json!(0), json!(2), json!(5e-324)], vec![json!(-1), json!(999_999), json!("hot")]),
            ("top_p", vec![json!(1.0), json!(0.01), json!(1e-300)], vec![json!(-1), json!(0), json!(1.5)]),
            ("min_p", vec![json!(0), json!(1.0)], vec![json!(-0.1), json!(1.5)]),
            ("top_k", vec![json!(-1), json!(0), json!(4096), json!(9_999_999)], vec![json!(-2), json!(1.5)]),
            ("repetition_penalty", vec![json!(1.0), json!(0.01)], vec![json!(0), json!(-1), json!(1e-40)]),
            ("n", vec![json!(1), json!(128)], vec![json!(0), json!(-1), json!(100_000)]),
            ("stop", vec![json!([]), json!("x"), json!(["a", "b", "c", "d", "e"])], vec![json!(""), json!([""]), json!(7), json!([7])]),
            ("stop_token_ids", vec![json!([0, 5.0, 4095])], vec![json!([4096]), json!([-1]), json!([0.5]), json!(["5"])]),
            ("seed", vec![json!(0), json!(u64::MAX)], vec![json!(-1), json!(1.5)]),
            ("logit_bias", vec![json!({"4095": -100})], vec![json!({"4096": 5}), json!({"-1": 5}), json!({"abc": 5}), json!({"5": 1000})]),
            ("speculation", vec![json!("off"), json!("tree:32")], vec![json!("tree:65"), json!("fast")]),
            ("store", vec![json!(false)], vec![json!(true)]),
            ("best_of_unknown", vec![json!(7)], vec![]),
        ] {
            for value in good {
                assert!(parse(json!({field: value})).is_ok(), "{field} {value}");
            }
            for value in bad {
                let error = parse(json!({field: value})).unwrap_err();
                assert!(error.message.contains(field), "{field} {value}: {}", error.message);
                assert_eq!(error.status, 400);
            }
        }
    }

    #[test]
    fn keeping_as_many_tokens_as_there_are_is_keeping_all() {
        for top_k in [json!(0), json!(-1), json!(4096), json!(4097), json!(9_999_999), Value::Null] {
            assert_eq!(parse(json!({"top_k": top_k})).unwrap().sampling.top_k, 0);
        }
        assert_eq!(parse(json!({"top_k": 4095})).unwrap().sampling.top_k, 4095);
    }

    #[test]
    fn room_is_exact_at_the_limit() {
        let asked = |max: u32| parse(json!({"max_tokens": max})).unwrap();
        assert_eq!(asked(4).room(60, 64, 1000), Ok(4));
        assert_eq!(asked(5).room(60, 64, 1000), Ok(4));
        assert_eq!(asked(1).room(63, 64, 1000), Ok(1));
        assert_eq!(parse(json!({})).unwrap().room(63, 64, 1000), Ok(1));
        for prompt in [64, 65] {
            let error = asked(1).room(prompt, 64, 1000).unwrap_err();
            assert_eq!(error.code, Some("context_length_exceeded"));
            assert!(error.message.contains(&prompt.to_string()) && error.message.contains("64"));
        }
        assert_eq!(asked(4).room(400, 1024, 256).unwrap_err().code, Some("kv_capacity_exceeded"));
    }

    #[test]
    fn log_probabilities_of_prompts_are_limited_over_all_choices() {
        let choices = |n: u32| parse(json!({"n": n})).unwrap();
        assert_eq!(choices(128).check_prompt_logprobs(None, usize::MAX), Ok(()));
        assert_eq!(choices(1).check_prompt_logprobs(Some(15), 1 << 18), Ok(()));
        assert_eq!(choices(128).check_prompt_logprobs(Some(1), 8192), Ok(()));
        for (n, top, tokens) in [(1, 16, 1 << 18), (128, 20, 8000), (128, 20, usize::MAX)] {
            let error = choices(n).check_prompt_logprobs(Some(top), tokens).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("prompt_logprobs")));
        }
    }

    #[test]
    fn log_probabilities_of_an_answer_in_one_piece_are_limited_and_an_open_length_is_cut_to_them() {
        let fit = |body: Value, mut rooms: Vec<u32>| parse(body)?.fit_logprobs("top_logprobs", Some(20), &mut rooms).map(|()| rooms);
        assert_eq!(fit(json!({"n": 6, "max_tokens": 8192}), vec![8192]), Ok(vec![8192]));
        assert_eq!(fit(json!({"n": 128, "max_tokens": 8192, "stream": true}), vec![8192]), Ok(vec![8192]));
        assert_eq!(fit(json!({"n": 128}), vec![8192]), Ok(vec![390]));
        assert_eq!(fit(json!({}), vec![1 << 18, 100]), Ok(vec![24_966, 100]));
        for body in [json!({"n": 128, "max_tokens": 8192}), json!({"n": 128, "min_tokens": 400})] {
            let error = fit(body, vec![8192]).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("top_logprobs")));
            assert!(error.message.contains("22020096") && error.message.contains("Lower max_tokens, n or"), "{}", error.message);
        }
        assert!(parse(json!({"n": 128})).unwrap().fit_logprobs("logprobs", None, &mut [u32::MAX]).is_ok());
    }

    #[test]
    fn min_tokens_above_max_tokens_names_both() {
        let error = parse(json!({"min_tokens": 80, "max_tokens": 50})).unwrap_err();
        assert!(error.message.contains("min_tokens = 80") && error.message.contains("max_tokens = 50"));
    }

    #[test]
    fn the_newer_spelling_of_max_tokens_wins() {
        assert_eq!(parse(json!({"max_tokens": 50, "max_completion_tokens": 5})).unwrap().max_tokens, Some(5));
        assert!(parse(json!({"max_tokens": -1, "max_completion_tokens": 5})).is_err());
    }

    #[test]
    fn choices_of_one_seed_differ_and_repeat() {
        let common = parse(json!({"seed": 5, "n": 3})).unwrap();
        let seeds: Vec<_> = (0..3).map(|index| common.seed_of(index, || unreachable!())).collect();
        assert_eq!(seeds[0], 5);
        assert!(seeds[1] != seeds[0] && seeds[2] != seeds[1] && seeds[2] != seeds[0]);
        assert_eq!(seeds, (0..3).map(|index| common.seed_of(index, || 0)).collect::<Vec<_>>());
    }
}
