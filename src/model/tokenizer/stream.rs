//! Text of tokens as they arrive: what is complete goes out, half a character waits for the next token.

use super::Tokenizer;

/// Decodes one stream of tokens. The concatenation of everything it returns equals `Tokenizer::decode` of all ids.
#[derive(Clone, Debug, Default)]
pub struct StreamDecoder {
    /// The beginning of a character, at most three bytes between calls.
    held: Vec<u8>,
    skip_special: bool,
}

impl StreamDecoder {
    /// `skip_special` leaves hidden control tokens out, as in `Tokenizer::decode`.
    pub fn new(skip_special: bool) -> Self {
        Self { held: Vec::new(), skip_special }
    }

    /// The text that became certain with this token; may be empty.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.held.extend_from_slice(tokenizer.visible_bytes(id, self.skip_special));
        let mut text = String::new();
        let mut done = 0;
        for chunk in self.held.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            // The last invalid stretch may be a character that is not complete yet.
            if invalid.is_empty() || (done + invalid.len() == self.held.len() && is_beginning(invalid)) {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            done += invalid.len();
        }
        self.held.drain(..done);
        text
    }

    /// The end of the stream: half a character left over becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
    }
}

/// Whether more bytes could complete these to a character.
fn is_beginning(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::mini;
    use super::*;

    fn stream(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Vec<String> {
        let mut decoder = StreamDecoder::new(skip_special);
        let mut texts: Vec<String> = ids.iter().map(|&id| decoder.push(tokenizer, id)).collect();
        texts.push(decoder.finish());
        texts
    }

    #[test]
    fn a_character_of_several_tokens_arrives_whole() {
        let tokenizer = mini();
        let ids = tokenizer.encode("東é🎭");
        assert!(ids.len() > 3, "every character is several tokens in this vocabulary");
        let texts = stream(&tokenizer, &ids, false);
        assert!(texts.iter().all(|text| !text.contains(char::REPLACEMENT_CHARACTER)));
        assert_eq!(texts.concat(), "東é🎭");
        assert_eq!(texts.iter().filter(|text| !text.is_empty()).count(), 3);
    }

    #[test]
    fn a_character_cut_at_the_end_becomes_one_replacement() {
        let tokenizer = mini();
        let ids = tokenizer.encode("🎭");
        let texts = stream(&tokenizer, &ids[..ids.len() - 1], false);
        assert_eq!(texts.concat(), "\u{fffd}");
        assert_eq!(texts.last().unwrap(), "\u{fffd}");
    }

    proptest! {
        #[test]
        fn a_stream_gives_the_text_of_the_whole(ids in proptest::collection::vec(prop_oneof![0_u32..256, 0_u32..4200], 0..60), skip: bool) {
            let tokenizer = mini_once();
            prop_assert_eq!(stream(tokenizer, &ids, skip).concat(), tokenizer.decode(&ids, skip));
        }
    }

    fn mini_once() -> &'static Tokenizer {
        static TOKENIZER: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
        TOKENIZER.get_or_init(mini)
    }
}
