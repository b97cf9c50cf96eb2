//! Size classes of steps that only decode: each is captured once, and a step is padded to the next class.

use kernels::cuda::attention::SPLIT;

/// Rows of the largest class: beyond it a step is so long that launching it costs nothing.
const MAX_ROWS: usize = 256;

/// Contexts of the smallest class: one split.
const LEAST_CONTEXT: usize = SPLIT;

/// Upper limits of what a captured step may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Class {
    pub rows: usize,
    pub context: usize,
}

impl Class {
    /// The least class for `rows` decoding rows whose longest context is `context`; powers of two, so at most twice what
    /// is needed. `None` for more rows than any class has.
    pub fn of(rows: usize, context: usize) -> Option<Self> {
        (rows > 0 && rows <= MAX_ROWS).then(|| Self {
            rows: rows.next_power_of_two(),
            context: context.max(LEAST_CONTEXT).next_power_of_two(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_what_they_are_for_and_are_few() {
        let mut classes = std::collections::HashSet::new();
        for rows in 1..=MAX_ROWS {
            for context in [1, 127, 128, 129, 4000, 40_960] {
                let class = Class::of(rows, context).unwrap();
                assert!((rows..2 * rows).contains(&class.rows) && class.context >= context, "{class:?}");
                classes.insert(class);
            }
        }
        assert_eq!(classes.len(), 9 * 4);
        assert_eq!((Class::of(0, 1), Class::of(MAX_ROWS + 1, 1)), (None, None));
    }
}
