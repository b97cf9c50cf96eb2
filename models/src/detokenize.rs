//! Streaming detokenizer: one token id in, the text that is certain so far out.

use std::sync::Arc;

use crate::tokenizer::Tokenizer;

/// Turns a stream of ids into text deltas. The bytes of a character that is not complete yet are held back
/// (at most three), so a delta is never a broken character, and the deltas together, with
/// [`flush`](Self::flush), are exactly [`Tokenizer::decode`] of all ids. Each push looks at its own token's
/// bytes and those held back, never at older text.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special_tokens: bool,
    /// An incomplete character: a prefix of some valid UTF-8 sequence, hence at most three bytes.
    held: Vec<u8>,
}

impl Detokenizer {
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool) -> Self {
        Self { tokenizer, skip_special_tokens, held: Vec::new() }
    }

    /// The text that becomes certain with `id`; often empty inside a character.
    pub fn push(&mut self, id: u32) -> String {
        if self.skip_special_tokens && self.tokenizer.is_special(id) {
            return String::new();
        }
        self.held.extend(self.tokenizer.token_bytes(id).unwrap_or_default());
        let (text, complete) = decode_complete(&self.held);
        self.held.drain(..complete);
        text
    }

    /// What remains when no more ids come: U+FFFD for a character that was never completed, else nothing.
    pub fn flush(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        text
    }
}

/// Decodes all but an incomplete tail; returns the text and how many bytes it stands for. Invalid bytes
/// become U+FFFD by the same rule as `String::from_utf8_lossy`: one for each maximal invalid part. The rule
/// looks only at bytes up to the part's end, which is why decoding piece by piece gives the same text.
fn decode_complete(bytes: &[u8]) -> (String, usize) {
    let mut text = String::with_capacity(bytes.len());
    let mut done = 0;
    loop {
        match std::str::from_utf8(&bytes[done..]) {
            Ok(valid) => {
                text.push_str(valid);
                return (text, bytes.len());
            }
            Err(error) => {
                let valid = &bytes[done..done + error.valid_up_to()];
                text.push_str(&String::from_utf8_lossy(valid));
                done += valid.len();
                match error.error_len() {
                    Some(invalid) => {
                        text.push(char::REPLACEMENT_CHARACTER);
                        done += invalid;
                    }
                    None => return (text, done),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes that are often a part of some character, and sometimes nonsense.
    fn nearly_utf8() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            any::<char>().prop_map(|c| c.to_string().into_bytes()[..1].to_vec()),
            any::<u8>().prop_map(|byte| vec![byte]),
        ];
        proptest::collection::vec(part, 0..20).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn pieces_of_any_bytes_decode_as_the_whole(bytes in nearly_utf8(), step in 1usize..6) {
            let (mut held, mut text) = (Vec::new(), String::new());
            for piece in bytes.chunks(step) {
                held.extend(piece);
                let (delta, complete) = decode_complete(&held);
                held.drain(..complete);
                prop_assert!(held.len() < 4);
                text.push_str(&delta);
            }
            text.push_str(&String::from_utf8_lossy(&held));
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
