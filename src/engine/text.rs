//! Text of one request as it becomes certain: half characters and possible beginnings of a stop string are held back.

use crate::model::tokenizer::{StreamDecoder, Tokenizer};

/// Decoder and stop-string search of one request. Control tokens give no text, but what was held back before them is released:
/// a stop string never reaches across a control token.
pub struct TextStream {
    decoder: StreamDecoder,
    stops: Vec<String>,
    include_stop: bool,
    /// Decoded text that may be the beginning of a stop string.
    held: String,
}

/// What one token released.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Released {
    pub text: String,
    /// The stop string that was completed; nothing follows it.
    pub stop: Option<String>,
}

impl TextStream {
    pub fn new(stops: &[String], include_stop: bool) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Self { decoder: StreamDecoder::new(true), stops, include_stop, held: String::new() }
    }

    /// Takes in one token; `may_stop` is false before `min_tokens`.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32, may_stop: bool) -> Released {
        if tokenizer.is_special(token) {
            return Released { text: self.flush(), stop: None };
        }
        self.held.push_str(&self.decoder.push(tokenizer, token));
        if !may_stop {
            return Released { text: std::mem::take(&mut self.held), stop: None };
        }
        self.release()
    }

    /// Everything still held: the request has ended (or a control token came).
    pub fn flush(&mut self) -> String {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(&self.decoder.finish());
        text
    }

    fn release(&mut self) -> Released {
        // The earliest match wins; of two at one place the longer.
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str()).map(|at| (at, stop)));
        if let Some((at, stop)) = found.min_by_key(|(at, stop)| (*at, std::cmp::Reverse(stop.len()))) {
            let end = if self.include_stop { at + stop.len() } else { at };
            let (text, stop) = (self.held[..end].to_string(), stop.clone());
            self.held.clear();
            return Released { text, stop: Some(stop) };
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Released { text: std::mem::replace(&mut self.held, rest), stop: None }
    }
}

/// Bytes at the end of `text` that are a beginning of `stop` (not all of it).
fn overlap(text: &str, stop: &str) -> usize {
    let most = (stop.len() - 1).min(text.len());
    (1..=most).rev().find(|&len| stop.is_char_boundary(len) && text.as_bytes().ends_with(&stop.as_bytes()[..len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use proptest::prelude::*;

    use super::*;
    use crate::model::source::ModelSource;

    fn tokenizer() -> &'static Tokenizer {
        static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
        TOKENIZER.get_or_init(|| Tokenizer::load(&ModelSource::directory("models/k26-mini")).unwrap())
    }

    fn run(text: &str, stops: &[String], include: bool) -> (String, Option<String>) {
        let mut stream = TextStream::new(stops, include);
        let mut out = String::new();
        for token in tokenizer().encode(text) {
            let released = stream.push(tokenizer(), token, true);
            out.push_str(&released.text);
            if released.stop.is_some() {
                return (out, released.stop);
            }
        }
        out.push_str(&stream.flush());
        (out, None)
    }

    proptest! {
        #[test]
        fn text_ends_exactly_before_the_first_stop_string(text in "[ab\u{e9}\u{1f600} ]{0,24}", stops in prop::collection::vec("[ab\u{e9}]{1,3}", 0..3)) {
            let first = stops.iter().filter_map(|stop| text.find(stop.as_str())).min();
            let (without, stop) = run(&text, &stops, false);
            prop_assert_eq!(stop.is_some(), first.is_some());
            // A stop string that is complete first wins even where another would have begun earlier and ended later.
            match stop {
                None => prop_assert_eq!(&without, &text),
                Some(stop) => {
                    let joined = format!("{without}{stop}");
                    prop_assert!(text.starts_with(joined.as_str()));
                    prop_assert_eq!(run(&text, &stops, true).0, joined);
                }
            }
        }
    }

    #[test]
    fn nothing_of_a_stop_string_leaks_before_it_is_complete() {
        let mut stream = TextStream::new(&["END".into()], false);
        let released: Vec<String> = ["x", "E", "N", "q"]
            .into_iter()
            .map(|text| tokenizer().encode(text))
            .map(|ids| stream.push(tokenizer(), ids[0], true).text)
            .collect();
        assert_eq!(released, ["x", "", "", "ENq"]);
    }

    #[test]
    fn a_control_token_releases_what_was_held_and_adds_nothing() {
        let mut stream = TextStream::new(&["END".into()], false);
        let e = tokenizer().encode("E")[0];
        assert_eq!(stream.push(tokenizer(), e, true).text, "");
        let marker = tokenizer().special("</think>").unwrap();
        assert_eq!(stream.push(tokenizer(), marker, true), Released { text: "E".into(), stop: None });
    }
}
