//! Stop strings in streamed text.

use crate::error::ModelError;

/// Cuts a stream of text at the first stop string.
///
/// Text that could still become a stop string is held back, and nothing else is; so no delta ever shows a
/// part of a stop string, and [`flush`](Self::flush) releases what did not become one. The first stop string
/// to be *completed* wins, and of several completed by the same character the one that starts first. This
/// depends on the text alone and not on how it is cut into deltas, so streaming and non-streaming agree.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// The longest suffix of the text so far that is a proper prefix of some stop string.
    held: String,
    matched: Option<usize>,
}

/// What a delta became.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopStep {
    /// Text to send now.
    pub text: String,
    /// The index of the stop string that was found; nothing more is to be sent.
    pub matched: Option<usize>,
}

impl StopMatcher {
    /// # Errors
    /// [`ModelError::EmptyStopString`]: an empty string would match at once.
    pub fn new(stops: Vec<String>) -> Result<Self, ModelError> {
        match stops.iter().any(String::is_empty) {
            true => Err(ModelError::EmptyStopString),
            false => Ok(Self { stops, held: String::new(), matched: None }),
        }
    }

    /// Takes the next text. After a match, every further push gives nothing.
    pub fn push(&mut self, delta: &str) -> StopStep {
        if self.stops.is_empty() {
            return StopStep { text: delta.to_owned(), matched: None };
        }
        let mut text = String::new();
        for c in delta.chars() {
            if self.matched.is_some() {
                break;
            }
            self.held.push(c);
            self.matched = self.completed();
            match self.matched {
                Some(stop) => {
                    self.held.truncate(self.held.len() - self.stops[stop].len());
                    text.push_str(&self.held);
                    self.held.clear();
                }
                None => text.push_str(&self.release()),
            }
        }
        StopStep { text, matched: self.matched }
    }

    /// The text held back, when generation ends without a match (end of sequence, or the length limit).
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The index of the longest stop string that the held text ends with.
    fn completed(&self) -> Option<usize> {
        let ending = self.stops.iter().enumerate().filter(|(_, stop)| self.held.ends_with(stop.as_str()));
        ending.max_by_key(|(index, stop)| (stop.len(), std::cmp::Reverse(*index))).map(|(index, _)| index)
    }

    /// Takes from the front what can no longer start a stop string.
    fn release(&mut self) -> String {
        let could_start = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let ends = [self.held.len()];
        let mut starts = self.held.char_indices().map(|(at, _)| at).chain(ends);
        let keep = starts.find(could_start).expect("the empty suffix starts every string. This is a bug.");
        self.held.drain(..keep).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(stops.iter().map(|stop| stop.to_string()).collect()).unwrap()
    }

    /// All deltas, then the flush when nothing matched.
    fn run<'a>(stops: &[&str], deltas: impl IntoIterator<Item = &'a str>) -> (String, Option<usize>) {
        let mut matcher = matcher(stops);
        let mut text = String::new();
        let mut matched = None;
        for delta in deltas {
            let step = matcher.push(delta);
            text.push_str(&step.text);
            matched = step.matched;
        }
        text.push_str(&matcher.flush());
        (text, matched)
    }

    #[test]
    fn start_of_a_stop_string_was_sent_before_it_matched() {
        let mut matcher = matcher(&["\n\nUser:"]);
        assert_eq!(matcher.push("Hello\n").text, "Hello");
        assert_eq!(matcher.push("\nUs").text, "");
        let last = matcher.push("er: again");
        assert_eq!(last, StopStep { text: String::new(), matched: Some(0) });
        assert_eq!(matcher.flush(), "");
    }

    #[test]
    fn held_text_was_lost_when_generation_ended() {
        let mut matcher = matcher(&["MayZZZZZ"]);
        assert_eq!(matcher.push("April, May").text, "April, ");
        assert_eq!(matcher.flush(), "May");
    }

    #[test]
    fn text_after_a_match_is_dropped() {
        assert_eq!(run(&["b"], ["a", "b", "c", "d"]), ("a".into(), Some(0)));
    }

    #[test]
    fn overlapping_prefix_of_the_same_stop_is_seen() {
        assert_eq!(run(&["aab"], ["aaab", "x"]), ("a".into(), Some(0)));
        assert_eq!(run(&["aab"], ["a", "a", "a", "b"]), ("a".into(), Some(0)));
    }

    #[test]
    fn first_completed_stop_wins_and_then_the_one_that_starts_first() {
        assert_eq!(run(&["abcd", "bc"], ["abcd"]), ("a".into(), Some(1)));
        assert_eq!(run(&["cd", "bcd"], ["abcd"]), ("a".into(), Some(1)));
    }

    #[test]
    fn characters_of_several_bytes_are_never_split() {
        assert_eq!(run(&["🫠🥹"], ["龜🫠", "𠮷🫠", "🥹x"]), ("龜🫠𠮷".into(), Some(0)));
        assert_eq!(run(&["é!"], ["caf", "é", "?"]), ("café?".into(), None));
    }

    #[test]
    fn empty_stop_string_is_refused() {
        let error = StopMatcher::new(vec![String::new(), "x".into()]).unwrap_err();
        assert_eq!(error.label(), "empty_stop_string");
    }

    /// The rule, written without any streaming.
    fn reference(text: &str, stops: &[String]) -> String {
        let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
        for end in ends {
            if let Some(stop) =
                stops.iter().filter(|stop| text[..end].ends_with(*stop)).max_by_key(|s| s.len())
            {
                return text[..end - stop.len()].to_owned();
            }
        }
        text.to_owned()
    }

    proptest! {
        #[test]
        fn streaming_equals_the_rule_for_any_split(
            deltas in proptest::collection::vec("[abé]{0,4}", 0..12),
            stops in proptest::collection::vec("[abé]{1,4}", 0..4),
        ) {
            let text = deltas.concat();
            let stops_ref: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (streamed, _) = run(&stops_ref, deltas.iter().map(String::as_str));
            let (whole, _) = run(&stops_ref, [text.as_str()]);
            prop_assert_eq!(&streamed, &reference(&text, &stops));
            prop_assert_eq!(streamed, whole);
        }
    }
}
