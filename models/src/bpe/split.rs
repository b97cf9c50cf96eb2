//! Qwen's pattern for words, as a scanner.

use super::classes::{Classes, LETTER, NEWLINE, NUMBER, SPACE};

/// What [`word_end`] does.
pub(super) const PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Where the word that begins at `at` ends, in bytes. Every character is in some word, so words follow each other
/// without a gap.
pub(super) fn word_end(classes: &Classes, text: &str, at: usize) -> usize {
    let scan = Scan { classes, text };
    let (class, next) = scan.class(at);
    let first = text.as_bytes()[at];
    if first == b'\''
        && let Some(end) = scan.contraction(next)
    {
        return end;
    }
    // [^\r\n\p{L}\p{N}]?\p{L}+
    if class & LETTER != 0 {
        return scan.run(next, LETTER);
    }
    if class & NUMBER != 0 {
        return next;
    }
    let after = scan.class_or_end(next);
    if class & NEWLINE == 0 && after & LETTER != 0 {
        return scan.run(next, LETTER);
    }
    // ` ?[^\s\p{L}\p{N}]+[\r\n]*`
    if class & SPACE == 0 {
        return scan.run(scan.others(next), NEWLINE);
    }
    if first == b' ' && next < text.len() && after & (SPACE | LETTER | NUMBER) == 0 {
        return scan.run(scan.others(next), NEWLINE);
    }
    scan.spaces(at)
}

struct Scan<'a> {
    classes: &'a Classes,
    text: &'a str,
}

impl Scan<'_> {
    /// The class of the character at `at`, and where the next one begins.
    fn class(&self, at: usize) -> (u8, usize) {
        let byte = self.text.as_bytes()[at];
        if byte < 128 {
            return (self.classes.of_ascii(byte), at + 1);
        }
        let c = self.text[at..].chars().next().expect("not at the end. This is a bug.");
        (self.classes.of(c), at + c.len_utf8())
    }

    /// The class of the character at `at`, or none at the end.
    fn class_or_end(&self, at: usize) -> u8 {
        if at < self.text.len() { self.class(at).0 } else { 0 }
    }

    /// Where the run of characters of `class` that begins at `at` ends; it may be empty.
    fn run(&self, at: usize, class: u8) -> usize {
        self.while_class(at, |of| of & class != 0)
    }

    /// The same for those that are neither space, letter nor number.
    fn others(&self, at: usize) -> usize {
        self.while_class(at, |of| of & (SPACE | LETTER | NUMBER) == 0)
    }

    fn while_class(&self, mut at: usize, holds: impl Fn(u8) -> bool) -> usize {
        while at < self.text.len() {
            let (class, next) = self.class(at);
            if !holds(class) {
                break;
            }
            at = next;
        }
        at
    }

    /// `(?i:'s|'t|'re|'ve|'m|'ll|'d)` after the apostrophe. Without regard to case, U+017F is an s.
    fn contraction(&self, at: usize) -> Option<usize> {
        let bytes = self.text.as_bytes();
        let lower = |at: usize| bytes.get(at).map(u8::to_ascii_lowercase);
        match (lower(at)?, lower(at + 1)) {
            (b's' | b't' | b'm' | b'd', _) => Some(at + 1),
            (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) => Some(at + 2),
            _ => self.text[at..].starts_with('\u{17f}').then_some(at + 2),
        }
    }

    /// `\s*[\r\n]+|\s+(?!\S)|\s+` at a space: to the last newline of the run; else all but the last one where something
    /// follows, which goes with it; else the one.
    fn spaces(&self, start: usize) -> usize {
        let (mut at, mut last, mut newline) = (start, start, None);
        while at < self.text.len() {
            let (class, next) = self.class(at);
            if class & SPACE == 0 {
                break;
            }
            if class & NEWLINE != 0 {
                newline = Some(next);
            }
            (last, at) = (at, next);
        }
        match newline {
            Some(end) => end,
            None if at == self.text.len() || last == start => at,
            None => last,
        }
    }
}
