//! From pairs of blocks to spans. Pure.

use crate::transport::Span;

/// The fewest spans that copy each source block to its destination block, in the order given.
///
/// Blocks are `block_bytes` long and lie back to back in both pools, so a run whose block ids rise by one on both
/// sides is one span. Descriptors cost: 3,640 spans of 32 KiB move at half the speed of 65 whole blocks, and NIXL
/// does not merge neighbours itself.
pub fn coalesce(pairs: impl Iterator<Item = (u32, u32)>, block_bytes: u64) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for (src, dst) in pairs {
        let (local, remote) = (u64::from(src) * block_bytes, u64::from(dst) * block_bytes);
        match spans.last_mut() {
            Some(last) if last.local + last.len == local && last.remote + last.len == remote => {
                last.len += block_bytes;
            }
            _ => spans.push(Span { local, remote, len: block_bytes }),
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_run_on_both_sides_is_one_span() {
        let spans = coalesce([(4, 9), (5, 10), (6, 11)].into_iter(), 8);
        assert_eq!(spans, [Span { local: 32, remote: 72, len: 24 }]);
    }

    #[test]
    fn a_run_on_one_side_only_is_not_merged() {
        assert_eq!(coalesce([(4, 9), (5, 7)].into_iter(), 8).len(), 2);
        assert_eq!(coalesce([(4, 9), (2, 10)].into_iter(), 8).len(), 2);
    }

    #[test]
    fn no_pairs_no_spans() {
        assert!(coalesce(std::iter::empty(), 8).is_empty());
    }

    #[test]
    fn the_largest_ids_do_not_overflow() {
        let spans = coalesce([(u32::MAX, u32::MAX)].into_iter(), 1 << 24);
        assert_eq!(spans[0].local, u64::from(u32::MAX) << 24);
    }

    proptest! {
        #[test]
        fn spans_copy_exactly_the_pairs_and_are_the_fewest(
            runs in prop::collection::vec((0u32..1000, 0u32..1000, 1u32..5), 0..40),
            block_bytes in 1u64..100_000,
        ) {
            let pairs: Vec<_> =
                runs.iter().flat_map(|&(s, d, n)| (0..n).map(move |i| (s + i, d + i))).collect();
            let spans = coalesce(pairs.iter().copied(), block_bytes);

            let copied: Vec<_> = spans
                .iter()
                .flat_map(|s| (0..s.len / block_bytes).map(move |i| (s.local + i * block_bytes, s.remote + i * block_bytes)))
                .collect();
            let wanted: Vec<_> =
                pairs.iter().map(|&(s, d)| (u64::from(s) * block_bytes, u64::from(d) * block_bytes)).collect();
            prop_assert_eq!(copied, wanted);

            let breaks = pairs.windows(2).filter(|w| w[1] != (w[0].0 + 1, w[0].1 + 1)).count();
            prop_assert_eq!(spans.len(), if pairs.is_empty() { 0 } else { breaks + 1 });
        }
    }
}
