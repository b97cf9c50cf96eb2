//! Order statistics over a few measured values.

use serde::Serialize;

/// The value below which a share `p` of the values lies (0 to 1), interpolated between neighbours; `None` if there
/// are none.
pub fn percentile(values: &[f64], p: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let at = p.clamp(0.0, 1.0) * last as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    Some(sorted[low] + (sorted[high] - sorted[low]) * at.fract())
}

pub fn median(values: &[f64]) -> Option<f64> {
    percentile(values, 0.5)
}

pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// A quantity measured in several repeats: how large it is, and how far the repeats are apart.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Median of the repeats' medians.
    pub median: f64,
    /// The lowest and the highest of the repeats' medians.
    pub low: f64,
    pub high: f64,
    /// 90th percentile of all values of all repeats.
    pub p90: f64,
}

impl Spread {
    /// `None` if no repeat has a value.
    pub fn of(repeats: &[Vec<f64>]) -> Option<Self> {
        let medians: Vec<f64> = repeats.iter().filter_map(|values| median(values)).collect();
        Some(Self {
            median: median(&medians)?,
            low: percentile(&medians, 0.0)?,
            high: percentile(&medians, 1.0)?,
            p90: percentile(&repeats.concat(), 0.9)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate_whatever_the_order() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(percentile(&[10.0, 0.0], 0.9), Some(9.0));
        assert_eq!(percentile(&[1.0, 2.0], 1.5), Some(2.0));
        assert_eq!(median(&[7.0]), Some(7.0));
        assert_eq!((median(&[]), mean(&[])), (None, None));
        assert_eq!(mean(&[1.0, 2.0]), Some(1.5));
    }

    #[test]
    fn a_spread_is_over_the_medians_of_repeats() {
        let spread = Spread::of(&[vec![1.0, 2.0, 30.0], vec![], vec![4.0], vec![3.0, 3.0]]).unwrap();
        assert_eq!((spread.median, spread.low, spread.high), (3.0, 2.0, 4.0));
        assert_eq!(spread.p90, 17.0);
        assert_eq!(Spread::of(&[vec![]]), None);
    }
}
