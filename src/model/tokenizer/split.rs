//! Cuts extreme text before it meets the regular expression, as Kimi's own tokenizer does: parts of at most 400,000 characters, and in them
//! runs of more than 25,000 characters that are all white space or all not. Needed for equal tokens on such text, against quadratic time,
//! and because a run of a million spaces overflows the expression's stack.

const PART: usize = 400_000;
const RUN: usize = 25_000;

/// The stretches of a text to encode one by one; joined they are the text.
pub fn parts(text: &str) -> impl Iterator<Item = &str> {
    Chunks { rest: text, limit: Limit::Characters(PART) }.flat_map(|part| Chunks { rest: part, limit: Limit::Run(RUN) })
}

#[derive(Clone, Copy)]
enum Limit {
    Characters(usize),
    /// Characters in a row of one class; the count starts anew at a change of class and at a cut.
    Run(usize),
}

struct Chunks<'a> {
    rest: &'a str,
    limit: Limit,
}

impl<'a> Iterator for Chunks<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.rest.is_empty() {
            return None;
        }
        let (chunk, rest) = self.rest.split_at(cut(self.rest, self.limit));
        self.rest = rest;
        Some(chunk)
    }
}

/// Where the first chunk ends.
fn cut(text: &str, limit: Limit) -> usize {
    // A byte is at least one character, so most text needs no look at its characters.
    let (Limit::Characters(most) | Limit::Run(most)) = limit;
    if text.len() <= most {
        return text.len();
    }
    match limit {
        Limit::Characters(most) => text.char_indices().nth(most).map_or(text.len(), |(at, _)| at),
        Limit::Run(most) => {
            let (mut run, mut class) = (0, None);
            for (at, character) in text.char_indices() {
                let space = is_space(character);
                run = if class == Some(space) { run + 1 } else { 1 };
                class = Some(space);
                if run > most {
                    return at;
                }
            }
            text.len()
        }
    }
}

/// Python's `str.isspace`: Unicode white space and the four information separators.
fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn runs_are_cut_and_mixed_text_is_not() {
        let lengths = |text: &str| -> Vec<usize> { parts(text).map(|part| part.chars().count()).collect() };
        assert_eq!(lengths(&"a".repeat(25_000)), [25_000]);
        assert_eq!(lengths(&" ".repeat(60_000)), [25_000, 25_000, 10_000]);
        assert_eq!(lengths(&"é ".repeat(100_000)), [200_000]);
        assert_eq!(lengths(&"é ".repeat(300_000)), [400_000, 200_000]);
        assert_eq!(lengths(&format!("{}{}b", "a ".repeat(10), "\u{1c}".repeat(25_000))), [20 + 24_999, 2]);
        assert_eq!(lengths(""), [] as [usize; 0]);
    }

    proptest! {
        #[test]
        fn nothing_is_lost(pieces in proptest::collection::vec(("[a ]|é|\u{3000}", 0_usize..60_000), 0..6)) {
            let text: String = pieces.iter().map(|(piece, times)| piece.repeat(*times)).collect();
            prop_assert_eq!(parts(&text).collect::<String>(), text.clone());
            prop_assert!(parts(&text).all(|part| !part.is_empty()));
        }
    }
}
