//! What the splitting pattern and NFC ask of a character, in one byte. The classes come from the tables of the very crates
//! that `tokenizers` uses, so both agree on characters that a Unicode version adds.

use std::sync::OnceLock;

use regex_syntax::hir::{Class, HirKind};
use unicode_normalization_alignments::char::canonical_combining_class;
use unicode_normalization_alignments::{IsNormalized, is_nfc_quick};

/// `\p{L}`
pub(super) const LETTER: u8 = 1;
/// `\p{N}`
pub(super) const NUMBER: u8 = 2;
/// `\s`
pub(super) const SPACE: u8 = 4;
/// `[\r\n]`, which are spaces as well.
pub(super) const NEWLINE: u8 = 8;
/// NFC may change it or what is beside it.
const UNSTABLE: u8 = 16;

/// Lowest first byte of a character that NFC may change: of U+0300. Below, every character is a starter that composes with
/// nothing before it.
const FIRST_UNSTABLE: u8 = 0xCC;

const PAGE: usize = 256;

/// Classes by character: 0x1100 pages, most of which are equal.
pub(super) struct Classes {
    ascii: [u8; 128],
    /// Page number of each run of 256 characters.
    index: Vec<u8>,
    pages: Vec<u8>,
}

impl Classes {
    /// The one table, made when it is first asked for.
    pub fn get() -> &'static Self {
        static CLASSES: OnceLock<Classes> = OnceLock::new();
        CLASSES.get_or_init(Self::new)
    }

    fn new() -> Self {
        let mut all = vec![0; char::MAX as usize + 1];
        for (class, pattern) in [(LETTER, r"\p{L}"), (NUMBER, r"\p{N}"), (SPACE, r"\s"), (NEWLINE, r"[\r\n]")]
        {
            for (start, end) in ranges(pattern) {
                all[start as usize..=end as usize].iter_mut().for_each(|entry| *entry |= class);
            }
        }
        for c in ('\u{300}'..=char::MAX).filter(|c| !is_inert(*c)) {
            all[c as usize] |= UNSTABLE;
        }
        let ascii = all[..128].try_into().expect("it is longer. This is a bug.");
        let (mut index, mut pages) = (Vec::new(), Vec::<u8>::new());
        for page in all.chunks(PAGE) {
            let known = pages.chunks(PAGE).position(|known| known == page);
            let number = known.unwrap_or_else(|| {
                pages.extend(page);
                pages.len() / PAGE - 1
            });
            index.push(u8::try_from(number).expect("Unicode has fewer different pages. This is a bug."));
        }
        Self { ascii, index, pages }
    }

    pub fn of_ascii(&self, byte: u8) -> u8 {
        self.ascii[usize::from(byte & 127)]
    }

    pub fn of(&self, c: char) -> u8 {
        let c = c as usize;
        self.pages[usize::from(self.index[c / PAGE]) * PAGE + c % PAGE]
    }

    /// True if NFC leaves `text` as it is; false also where that takes more than a look at each character.
    pub fn is_normal(&self, text: &str) -> bool {
        // Compiles to vector compares, and is all that most texts take.
        let low = !text.as_bytes().iter().fold(false, |high, byte| high | (*byte >= FIRST_UNSTABLE));
        low || text.chars().all(|c| self.of(c) & UNSTABLE == 0)
    }
}

/// It stays, and nothing before or after it moves or joins with it (UAX #15, quick check).
fn is_inert(c: char) -> bool {
    canonical_combining_class(c) == 0 && matches!(is_nfc_quick(std::iter::once(c)), IsNormalized::Yes)
}

fn ranges(class: &str) -> Vec<(char, char)> {
    let parsed = regex_syntax::parse(class).expect("a fixed pattern. This is a bug.");
    match parsed.kind() {
        HirKind::Class(Class::Unicode(class)) => {
            class.ranges().iter().map(|range| (range.start(), range.end())).collect()
        }
        other => unreachable!("{class} is a class of characters, and not {other:?}. This is a bug."),
    }
}

#[cfg(test)]
mod tests {
    use unicode_normalization_alignments::UnicodeNormalization;
    use unicode_normalization_alignments::char::decompose_canonical;

    use super::*;

    /// For every character that exists: it is called stable only if it is, and if no other one is composed with it as the
    /// second. Composition is of pairs, so this is all that can happen.
    #[test]
    fn what_is_called_normal_is() {
        let classes = Classes::get();
        for c in '\0'..=char::MAX {
            let mut parts = Vec::new();
            decompose_canonical(c, |part| parts.push(part));
            let stable = |c| classes.of(c) & UNSTABLE == 0;
            if stable(c) {
                assert!(c.to_string().nfc().map(|(c, _)| c).eq([c]), "{c:?}");
            }
            let composes = parts.iter().copied().nfc_of().eq([c]);
            if parts.len() > 1 && composes {
                assert!(parts[1..].iter().all(|part| !stable(*part)), "{c:?} is {parts:?}");
            }
            if (c as u32) < 0x300 {
                assert!(stable(c));
            }
        }
    }

    trait Nfc {
        fn nfc_of(self) -> std::vec::IntoIter<char>;
    }

    impl<I: Iterator<Item = char>> Nfc for I {
        fn nfc_of(self) -> std::vec::IntoIter<char> {
            let text: String = self.collect();
            text.nfc().map(|(c, _)| c).collect::<Vec<_>>().into_iter()
        }
    }

    #[test]
    fn classes_are_those_of_ascii() {
        let classes = Classes::get();
        for byte in 0..128_u8 {
            let class = classes.of_ascii(byte);
            assert_eq!(class, classes.of(char::from(byte)));
            assert_eq!(class & LETTER != 0, byte.is_ascii_alphabetic());
            assert_eq!(class & NUMBER != 0, byte.is_ascii_digit());
            assert_eq!(class & SPACE != 0, byte.is_ascii_whitespace() || byte == 0x0b);
            assert_eq!(class & NEWLINE != 0, byte == b'\r' || byte == b'\n');
        }
    }
}
