//! The opening of a tool section, misspelt as text: K2 models sometimes write `<|tool_call_section_begin|>` letter by letter instead of
//! the control token, and go on with a real call. Used by [`super::ChatOutput`], which asks what may be shown to the client.
//!
//! Such text counts as the marker only where the control token of a call follows at once; everywhere else, in an answer about chat
//! templates for instance, it stays text. It is therefore held back until the next token decides.

const MARKER: &str = "<|tool_call_section_begin|>";

/// Text held back at the end of reasoning or content, because it may still become the marker.
#[derive(Default)]
pub struct MisspeltOpening {
    held: String,
}

impl MisspeltOpening {
    /// Takes further text; returns what is certainly none of the marker.
    pub fn push(&mut self, text: &str) -> String {
        self.held.push_str(text);
        let certain = self.held.char_indices().map(|(at, _)| at).find(|at| may_be_marker(&self.held[*at..])).unwrap_or(self.held.len());
        let rest = self.held.split_off(certain);
        std::mem::replace(&mut self.held, rest)
    }

    /// A call begins here: the whole marker is dropped, anything less was text.
    pub fn call_begins(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        if held.starts_with(MARKER) { String::new() } else { held }
    }

    /// Something else follows: what was held back is text.
    pub fn release(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// The beginning of the marker, or the whole of it and white space.
fn may_be_marker(tail: &str) -> bool {
    MARKER.starts_with(tail) || tail.strip_prefix(MARKER).is_some_and(|rest| rest.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_what_may_become_the_marker_is_held_back() {
        let mut opening = MisspeltOpening::default();
        assert_eq!(opening.push("a < b, <|tool"), "a < b, ");
        assert_eq!(opening.push("box|>"), "<|toolbox|>");
        assert_eq!(opening.push("x<<|tool_call_section_be"), "x<");
        assert_eq!(opening.push("gin|>\n"), "");
        assert_eq!(opening.call_begins(), "");
        assert_eq!(opening.push("<|tool_call_section_begin|> is"), "<|tool_call_section_begin|> is");
        assert_eq!(opening.push("<|tool_call"), "");
        assert_eq!(opening.call_begins(), "<|tool_call");
    }

    proptest! {
        /// However the text is cut, nothing is lost and nothing added when no call follows.
        #[test]
        fn released_text_is_the_text(parts in prop::collection::vec("(<\\|tool_call_section_begin\\|>|<\\|tool|<|_call_section| |ä|x){0,3}", 0..8)) {
            let mut opening = MisspeltOpening::default();
            let mut shown: String = parts.iter().map(|part| opening.push(part)).collect();
            shown.push_str(&opening.release());
            prop_assert_eq!(shown, parts.concat());
        }
    }
}
