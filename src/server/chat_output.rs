//! Splits what the model generates in a chat into reasoning, content and tool calls.
//!
//! ```text
//! [reasoning </think>] content [<|tool_calls_section_begin|>
//!     ( <|tool_call_begin|> ID <|tool_call_argument_begin|> JSON <|tool_call_end|> )+ <|tool_calls_section_end|>] <|im_end|>
//! ```
//!
//! Markers are single tokens and are recognised by id, so that text which merely looks like one stays text. The text that comes
//! with a marker is what was held back before it and belongs to the part the marker ends. The one exception: a misspelt opening of
//! the section right before a call, see [`misspelt`].

mod misspelt;

use misspelt::MisspeltOpening;

use crate::model::tokenizer::Tokenizer;

/// Token ids of the markers.
#[derive(Clone, Copy, Debug)]
pub struct Markers {
    pub think: u32,
    pub think_end: u32,
    pub section_begin: u32,
    pub section_end: u32,
    pub call_begin: u32,
    pub argument_begin: u32,
    pub call_end: u32,
}

impl Markers {
    /// `None` when the vocabulary lacks one of them; then neither reasoning nor tools can be told apart.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        Some(Self {
            think: tokenizer.special("<think>")?,
            think_end: tokenizer.special("</think>")?,
            section_begin: tokenizer.special("<|tool_calls_section_begin|>")?,
            section_end: tokenizer.special("<|tool_calls_section_end|>")?,
            call_begin: tokenizer.special("<|tool_call_begin|>")?,
            argument_begin: tokenizer.special("<|tool_call_argument_begin|>")?,
            call_end: tokenizer.special("<|tool_call_end|>")?,
        })
    }
}

impl Markers {
    /// The text of a marker, empty for other tokens: some vocabularies count `</think>` as visible text.
    fn name(&self, id: u32) -> &'static str {
        match id {
            id if id == self.think => "<think>",
            id if id == self.think_end => "</think>",
            id if id == self.section_begin => "<|tool_calls_section_begin|>",
            id if id == self.section_end => "<|tool_calls_section_end|>",
            id if id == self.call_begin => "<|tool_call_begin|>",
            id if id == self.argument_begin => "<|tool_call_argument_begin|>",
            id if id == self.call_end => "<|tool_call_end|>",
            _ => "",
        }
    }
}

/// One piece of output for the client, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    Reasoning(String),
    Content(String),
    /// A tool call begins; `index` counts the calls of this answer.
    CallBegin {
        index: usize,
        id: String,
        name: String,
    },
    CallArguments {
        index: usize,
        text: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Reasoning,
    Content,
    /// Inside the section, between calls.
    Section,
    CallId,
    Arguments,
    /// After the section: dropped, as vLLM does; the template has no place for it either.
    After,
}

/// Reads one answer token by token.
pub struct ChatOutput {
    markers: Markers,
    part: Part,
    tools: bool,
    /// Index in the conversation of this answer's first call, for ids the model left unnumbered.
    first_call: usize,
    calls: usize,
    call_id: String,
    arguments_empty: bool,
    /// White space at the start of content: dropped when a tool section follows at once.
    held_space: String,
    misspelt: MisspeltOpening,
    content_begun: bool,
    reasoning_tokens: u32,
}

impl ChatOutput {
    /// `thinking`: the prompt ended with an open `<think>`. `tools`: the request offers tools.
    pub fn new(markers: Markers, thinking: bool, tools: bool, first_call: usize) -> Self {
        Self {
            markers,
            part: if thinking { Part::Reasoning } else { Part::Content },
            tools,
            first_call,
            calls: 0,
            call_id: String::new(),
            arguments_empty: true,
            held_space: String::new(),
            misspelt: MisspeltOpening::default(),
            content_begun: false,
            reasoning_tokens: 0,
        }
    }

    /// Tool calls begun so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Tokens of the reasoning, its end marker not counted.
    pub fn reasoning_tokens(&self) -> u32 {
        self.reasoning_tokens
    }

    /// Takes one generated token and the text that became certain with it.
    pub fn token(&mut self, id: u32, text: &str, out: &mut Vec<Piece>) {
        let was_reasoning = self.part == Part::Reasoning;
        self.text(text.strip_suffix(self.markers.name(id)).unwrap_or(text), out);
        let m = self.markers;
        self.decide_misspelt(id, out);
        match id {
            id if id == m.think_end && self.part == Part::Reasoning => self.part = Part::Content,
            id if id == m.section_begin && self.tools => self.begin_section(),
            id if id == m.section_end && self.tools => self.end_section(out),
            id if id == m.call_begin && self.tools => self.begin_call(out),
            id if id == m.argument_begin && self.part == Part::CallId => self.begin_arguments(out),
            id if id == m.call_end && self.tools => self.end_call(out),
            _ => {}
        }
        if was_reasoning && self.part == Part::Reasoning {
            self.reasoning_tokens += 1;
        }
    }

    /// The answer is over. When it was cut by a limit, a call whose id was being written is none.
    pub fn finish(&mut self, cut: bool, out: &mut Vec<Piece>) {
        let held = self.misspelt.release();
        self.visible(&held, out);
        if !cut {
            self.end_call(out);
        }
        if !self.held_space.is_empty() && self.calls == 0 {
            out.push(Piece::Content(std::mem::take(&mut self.held_space)));
        }
    }

    fn text(&mut self, text: &str, out: &mut Vec<Piece>) {
        if text.is_empty() {
            return;
        }
        match self.part {
            Part::Reasoning | Part::Content if self.tools => {
                let certain = self.misspelt.push(text);
                self.visible(&certain, out);
            }
            Part::Reasoning | Part::Content => self.visible(text, out),
            Part::CallId => self.call_id.push_str(text),
            Part::Arguments => self.arguments(text, out),
            Part::Section | Part::After => {}
        }
    }

    /// Text that is certainly reasoning or content.
    fn visible(&mut self, text: &str, out: &mut Vec<Piece>) {
        match self.part {
            _ if text.is_empty() => {}
            Part::Reasoning => out.push(Piece::Reasoning(text.into())),
            _ => self.content(text, out),
        }
    }

    /// A control token tells whether the text held back before it was a misspelt marker. Other tokens were decided by their text.
    fn decide_misspelt(&mut self, id: u32, out: &mut Vec<Piece>) {
        let held = match id {
            id if id == self.markers.call_begin || id == self.markers.section_begin => self.misspelt.call_begins(),
            id if id == self.markers.think_end => self.misspelt.release(),
            _ => return,
        };
        self.visible(&held, out);
    }

    fn content(&mut self, text: &str, out: &mut Vec<Piece>) {
        if self.tools && !self.content_begun {
            if text.trim().is_empty() {
                self.held_space.push_str(text);
                return;
            }
            let held = std::mem::take(&mut self.held_space);
            out.push(Piece::Content(held + text));
        } else {
            out.push(Piece::Content(text.into()));
        }
        self.content_begun = true;
    }

    fn arguments(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.arguments_empty &= text.trim().is_empty();
        out.push(Piece::CallArguments { index: self.calls - 1, text: text.into() });
    }

    /// A section ends the reasoning too: models open it without closing their thinking.
    fn begin_section(&mut self) {
        if matches!(self.part, Part::Reasoning | Part::Content | Part::After) {
            self.held_space.clear();
            self.part = Part::Section;
        }
    }

    fn end_section(&mut self, out: &mut Vec<Piece>) {
        self.end_call(out);
        if self.part == Part::Section {
            self.part = Part::After;
        }
    }

    /// A call may come without its section, and without the end of the one before.
    fn begin_call(&mut self, out: &mut Vec<Piece>) {
        self.end_call(out);
        self.held_space.clear();
        self.call_id.clear();
        self.part = Part::CallId;
    }

    fn begin_arguments(&mut self, out: &mut Vec<Piece>) {
        let (id, name) = self.identity();
        out.push(Piece::CallBegin { index: self.calls, id, name });
        self.calls += 1;
        self.arguments_empty = true;
        self.part = Part::Arguments;
    }

    fn end_call(&mut self, out: &mut Vec<Piece>) {
        match self.part {
            // An id without arguments is a call without arguments.
            Part::CallId if !self.call_id.trim().is_empty() => {
                self.begin_arguments(out);
                out.push(Piece::CallArguments { index: self.calls - 1, text: "{}".into() });
            }
            Part::Arguments if self.arguments_empty => {
                out.push(Piece::CallArguments { index: self.calls - 1, text: "{}".into() });
            }
            Part::CallId | Part::Arguments => {}
            _ => return,
        }
        self.part = Part::Section;
    }

    /// Id and name from what the model wrote. A well-formed `functions.NAME:INDEX` is kept as it is; anything else is put into
    /// that form, since the template prints ids and the model goes on by them.
    fn identity(&self) -> (String, String) {
        let written = self.call_id.trim();
        let bare = written.strip_prefix("functions.").unwrap_or(written);
        let (name, number) = match bare.rsplit_once(':') {
            Some((name, number)) if !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) => (name, Some(number)),
            _ => (bare, None),
        };
        match number {
            Some(_) if bare.len() < written.len() => (written.into(), name.into()),
            Some(number) => (format!("functions.{name}:{number}"), name.into()),
            None => (format!("functions.{name}:{}", self.first_call + self.calls), name.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const M: Markers = Markers { think: 1, think_end: 2, section_begin: 3, section_end: 4, call_begin: 5, argument_begin: 6, call_end: 7 };
    const END: u32 = 8;
    const WORD: u32 = 100;

    /// `feed`: words are text, `</think>` and the like markers.
    fn run(thinking: bool, tools: bool, feed: &[&str]) -> (Vec<Piece>, ChatOutput) {
        let mut output = ChatOutput::new(M, thinking, tools, 0);
        let mut pieces = Vec::new();
        for item in feed {
            let (id, text) = match *item {
                "</think>" => (M.think_end, ""),
                "<section>" => (M.section_begin, ""),
                "</section>" => (M.section_end, ""),
                "<call>" => (M.call_begin, ""),
                "<args>" => (M.argument_begin, ""),
                "</call>" => (M.call_end, ""),
                "<end>" => (END, ""),
                text => (WORD, text),
            };
            output.token(id, text, &mut pieces);
        }
        output.finish(false, &mut pieces);
        (pieces, output)
    }

    fn begin(index: usize, id: &str, name: &str) -> Piece {
        Piece::CallBegin { index, id: id.into(), name: name.into() }
    }

    fn args(index: usize, text: &str) -> Piece {
        Piece::CallArguments { index, text: text.into() }
    }

    #[test]
    fn reasoning_ends_at_its_marker() {
        let (pieces, output) = run(true, false, &["pl", "an", "</think>", "An", "swer", "<end>"]);
        let wanted =
            [Piece::Reasoning("pl".into()), Piece::Reasoning("an".into()), Piece::Content("An".into()), Piece::Content("swer".into())];
        assert_eq!(pieces, wanted);
        assert_eq!((output.reasoning_tokens(), output.calls()), (2, 0));
    }

    #[test]
    fn a_tool_section_ends_the_reasoning_too() {
        let feed = ["plan", "<section>", "<call>", "functions.get:0", "<args>", "{\"a\"", ":1}", "</call>", "</section>", "<end>"];
        let (pieces, output) = run(true, true, &feed);
        assert_eq!(pieces, [Piece::Reasoning("plan".into()), begin(0, "functions.get:0", "get"), args(0, "{\"a\""), args(0, ":1}")]);
        assert_eq!((output.calls(), output.reasoning_tokens()), (1, 1));
    }

    #[test]
    fn a_call_without_its_section_is_a_call() {
        let (pieces, _) = run(true, true, &["plan", "<call>", "functions.get:0", "<args>", "{}", "</call>", "<end>"]);
        assert_eq!(pieces, [Piece::Reasoning("plan".into()), begin(0, "functions.get:0", "get"), args(0, "{}")]);
    }

    #[test]
    fn a_misspelt_section_before_a_call_is_none_of_the_text() {
        let call = ["<call>", "functions.get:0", "<args>", "{}", "</call>", "<|tool_call_section_end|>", "<end>"];
        for thinking in [true, false] {
            let feed = [&["pl", "an<|tool_call", "_section", "_begin|>", "\n"][..], &call].concat();
            let (pieces, _) = run(thinking, true, &feed);
            let shown = if thinking { Piece::Reasoning } else { Piece::Content };
            let wanted = [shown("pl".into()), shown("an".into()), begin(0, "functions.get:0", "get"), args(0, "{}")];
            assert_eq!(pieces, wanted);
        }
    }

    #[test]
    fn a_misspelt_section_before_anything_else_is_text() {
        let marker = "<|tool_call_section_begin|>";
        for (feed, wanted) in [
            (&["say ", marker, " twice"][..], vec![Piece::Content("say ".into()), Piece::Content(format!("{marker} twice"))]),
            (&[marker, "<end>"], vec![Piece::Content(marker.into())]),
            (
                &["<|tool_call", "<call>", "f", "<args>", "</call>"],
                vec![Piece::Content("<|tool_call".into()), begin(0, "functions.f:0", "f"), args(0, "{}")],
            ),
        ] {
            assert_eq!(run(false, true, feed).0, wanted, "{feed:?}");
        }
        let (pieces, _) = run(true, true, &[marker, "</think>", "Hi"]);
        assert_eq!(pieces, [Piece::Reasoning(marker.into()), Piece::Content("Hi".into())]);
        assert_eq!(run(false, false, &["<|tool", "_x"]).0, [Piece::Content("<|tool".into()), Piece::Content("_x".into())]);
    }

    #[test]
    fn text_after_the_section_is_dropped() {
        let (pieces, _) =
            run(false, true, &["Hi", "<section>", "<call>", "functions.a:0", "<args>", "{}", "</call>", "</section>", "more"]);
        assert_eq!(pieces, [Piece::Content("Hi".into()), begin(0, "functions.a:0", "a"), args(0, "{}")]);
    }

    #[test]
    fn white_space_before_a_section_is_dropped_and_before_words_kept() {
        let (pieces, _) = run(true, true, &["</think>", "\n", "\n", "<section>", "<call>", "functions.a:0", "<args>", "{}", "</call>"]);
        assert_eq!(pieces, [begin(0, "functions.a:0", "a"), args(0, "{}")]);
        let (pieces, _) = run(true, true, &["</think>", "\n", "Hi", " "]);
        assert_eq!(pieces, [Piece::Content("\nHi".into()), Piece::Content(" ".into())]);
        let (pieces, _) = run(true, true, &["</think>", " "]);
        assert_eq!(pieces, [Piece::Content(" ".into())]);
    }

    #[test]
    fn ids_are_kept_when_well_formed_and_mended_when_not() {
        for (written, id, name) in [
            ("functions.get_weather:7", "functions.get_weather:7", "get_weather"),
            (" functions.a.b-c:0 ", "functions.a.b-c:0", "a.b-c"),
            ("search:0", "functions.search:0", "search"),
            ("functions.search", "functions.search:0", "search"),
            ("search", "functions.search:0", "search"),
        ] {
            let (pieces, _) = run(false, true, &["<section>", "<call>", written, "<args>", "{}", "</call>"]);
            assert_eq!(pieces[0], begin(0, id, name), "{written}");
        }
    }

    #[test]
    fn parallel_calls_are_numbered_and_empty_arguments_become_an_object() {
        let feed =
            ["<section>", "<call>", "f", "<args>", "</call>", "<call>", "g", "</call>", "<call>", "h", "<args>", "{\"x\":", "</section>"];
        let (pieces, output) = run(false, true, &feed);
        let wanted = [
            begin(0, "functions.f:0", "f"),
            args(0, "{}"),
            begin(1, "functions.g:1", "g"),
            args(1, "{}"),
            begin(2, "functions.h:2", "h"),
            args(2, "{\"x\":"),
        ];
        assert_eq!(pieces, wanted);
        assert_eq!(output.calls(), 3);
    }

    #[test]
    fn without_tools_markers_vanish_and_make_no_call() {
        let (pieces, output) = run(false, false, &["a", "<section>", "<call>", "b", "<args>", "c", "</call>", "</section>"]);
        let text: String = pieces.iter().map(|piece| if let Piece::Content(text) = piece { text.as_str() } else { "!" }).collect();
        assert_eq!((text.as_str(), output.calls()), ("abc", 0));
    }

    #[test]
    fn text_held_back_before_a_marker_belongs_to_what_it_ends() {
        let mut output = ChatOutput::new(M, true, false, 0);
        let mut pieces = Vec::new();
        output.token(WORD, "", &mut pieces);
        output.token(M.think_end, "held", &mut pieces);
        output.token(WORD, "x", &mut pieces);
        assert_eq!(pieces, [Piece::Reasoning("held".into()), Piece::Content("x".into())]);
    }

    #[test]
    fn a_call_cut_in_its_id_is_none() {
        let mut output = ChatOutput::new(M, false, true, 0);
        let mut pieces = Vec::new();
        for (id, text) in [(M.section_begin, ""), (M.call_begin, ""), (WORD, "functions.ge")] {
            output.token(id, text, &mut pieces);
        }
        output.finish(true, &mut pieces);
        assert_eq!((pieces, output.calls()), (vec![], 0));
    }

    #[test]
    fn the_name_of_a_marker_is_no_text_and_a_lookalike_is() {
        let mut output = ChatOutput::new(M, true, false, 0);
        let mut pieces = Vec::new();
        output.token(WORD, "</think>", &mut pieces);
        output.token(M.think_end, "held</think>", &mut pieces);
        output.token(WORD, "x", &mut pieces);
        assert_eq!(pieces, [Piece::Reasoning("</think>".into()), Piece::Reasoning("held".into()), Piece::Content("x".into())]);
    }

    proptest! {
        /// Any order of markers and words: no panic, arguments only for calls that began, indexes in order, reasoning first.
        #[test]
        fn any_feed_gives_a_well_formed_answer(feed in prop::collection::vec(0u32..11, 0..60), thinking: bool, tools: bool, feed_cut: bool) {
            let mut output = ChatOutput::new(M, thinking, tools, 3);
            let mut pieces = Vec::new();
            for id in feed {
                let (id, text) = match id {
                    0 => (WORD, "w "),
                    9 => (WORD, "<|tool_call_section_begin|>"),
                    10 => (WORD, "<|tool"),
                    id => (id, ""),
                };
                output.token(id, text, &mut pieces);
            }
            output.finish(feed_cut, &mut pieces);
            let mut begun = 0;
            let mut left_reasoning = !thinking;
            for piece in &pieces {
                match piece {
                    Piece::Reasoning(_) => prop_assert!(!left_reasoning),
                    Piece::Content(_) => left_reasoning = true,
                    Piece::CallBegin { index, id, name } => {
                        prop_assert!(tools);
                        prop_assert_eq!(*index, begun);
                        prop_assert!(id.starts_with("functions.") && id.contains(name.as_str()));
                        begun += 1;
                        left_reasoning = true;
                    }
                    Piece::CallArguments { index, .. } => prop_assert_eq!(*index + 1, begun),
                }
            }
            prop_assert_eq!(begun, output.calls());
        }
    }
}
