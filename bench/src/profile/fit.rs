//! From times of known work to the coefficients of a step.

use engine::sim::Profile;

/// Number of coefficients: those of [`Profile`], and the cost of a request outside the engine's steps.
const N: usize = 6;

/// How often each coefficient counts.
pub type Work = [f64; N];

/// The coefficients of a least-squares fit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit([f64; N]);

/// The work until the first token of a prompt that is computed alone, `chunk` tokens a step.
pub fn prompt_work(tokens: usize, chunk: usize) -> Work {
    let mut work = [0.0; N];
    work[5] = 1.0;
    let mut computed = 0;
    while computed < tokens {
        let new = chunk.min(tokens - computed);
        computed += new;
        add_sequence(&mut work, new, computed as f64);
        work[0] += 1.0;
    }
    work
}

/// The work of a step in which `batch` sequences with `context` tokens in all get their next token.
pub fn decode_work(batch: usize, context: f64) -> Work {
    [1.0, 0.0, 0.0, batch as f64, context, 0.0]
}

/// As [`Profile::step`] counts it.
fn add_sequence(work: &mut Work, new: usize, context: f64) {
    match new {
        1 => {
            work[3] += 1.0;
            work[4] += context;
        }
        _ => {
            let new = new as f64;
            work[1] += new;
            work[2] += new * (context - new / 2.0);
        }
    }
}

impl Fit {
    /// The non-negative coefficients with the least sum of squared relative errors over `(work, seconds)`; `None` if
    /// there is no time above 0.
    ///
    /// Exact: the best fit has some set of coefficients at 0 and is the plain least-squares fit of the others, and there
    /// are only 63 sets to try.
    pub fn of(points: &[(Work, f64)]) -> Option<Self> {
        let rows: Vec<Work> =
            points.iter().filter(|p| p.1 > 0.0).map(|(work, seconds)| work.map(|x| x / seconds)).collect();
        let mut best: Option<(f64, [f64; N])> = None;
        for set in 1_u32..1 << N {
            let used: Vec<usize> = (0..N).filter(|i| set & (1 << i) != 0).collect();
            let Some(found) = least_squares(&rows, &used) else { continue };
            if found.iter().any(|&x| x < 0.0) {
                continue;
            }
            let error = rows.iter().map(|row| (dot(row, &found) - 1.0).powi(2)).sum();
            if best.is_none_or(|(least, _)| error < least) {
                best = Some((error, found));
            }
        }
        best.map(|(_, coefficients)| Self(coefficients))
    }

    pub fn seconds(&self, work: &Work) -> f64 {
        dot(work, &self.0)
    }

    pub fn profile(&self) -> Profile {
        let [base_s, prefill_s_per_token, attention_s_per_pair, decode_s_per_sequence, context, _] = self.0;
        Profile {
            base_s,
            prefill_s_per_token,
            attention_s_per_pair,
            decode_s_per_sequence,
            decode_s_per_context_token: context,
        }
    }

    /// What a request takes outside the engine's steps: HTTP, and the way to the engine and back.
    pub fn request_s(&self) -> f64 {
        self.0[5]
    }
}

fn dot(a: &Work, b: &Work) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Coefficients of the `used` columns so that every row is as near to 1 as can be, by the normal equations; the others
/// are 0. `None` if the rows do not decide them.
fn least_squares(rows: &[Work], used: &[usize]) -> Option<[f64; N]> {
    // Columns differ by ten orders of magnitude.
    let norm = |column: usize| rows.iter().map(|row| row[column].powi(2)).sum::<f64>().sqrt();
    let scale: Vec<f64> = used.iter().map(|&column| norm(column)).collect();
    if scale.contains(&0.0) {
        return None;
    }
    let value = |row: &Work, i: usize| row[used[i]] / scale[i];
    let n = used.len();
    let mut system: Vec<Vec<f64>> = (0..n)
        .map(|i| {
            let product = |j: usize| rows.iter().map(|row| value(row, i) * value(row, j)).sum();
            let target = rows.iter().map(|row| value(row, i)).sum();
            (0..n).map(product).chain([target]).collect()
        })
        .collect();
    let solved = solve(&mut system)?;
    let mut found = [0.0; N];
    used.iter().zip(&scale).zip(solved).for_each(|((&column, scale), x)| found[column] = x / scale);
    Some(found)
}

/// Gauss' elimination; each row ends with its right side.
fn solve(system: &mut [Vec<f64>]) -> Option<Vec<f64>> {
    // The diagonal is 1 at first: what is left of it is the part of a column that others do not explain.
    const SINGULAR: f64 = 1e-10;
    let n = system.len();
    for column in 0..n {
        let pivot =
            (column..n).max_by(|&a, &b| system[a][column].abs().total_cmp(&system[b][column].abs()))?;
        system.swap(column, pivot);
        if system[column][column].abs() < SINGULAR {
            return None;
        }
        let row = system[column].clone();
        for other in (0..n).filter(|&other| other != column) {
            let factor = system[other][column] / row[column];
            system[other].iter_mut().zip(&row).for_each(|(x, pivot)| *x -= factor * pivot);
        }
    }
    Some((0..n).map(|i| system[i][n] / system[i][i]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRUE: Fit = Fit([4e-3, 2e-4, 3e-8, 1e-3, 2e-6, 5e-3]);

    fn works() -> Vec<Work> {
        let prompts = [128, 512, 1024, 2048].map(|tokens| prompt_work(tokens, 512));
        let decodes = [128, 1024].into_iter().flat_map(|context| {
            [1, 4, 8].map(|batch| decode_work(batch, (batch * context) as f64 + 20.0 * batch as f64))
        });
        prompts.into_iter().chain(decodes).collect()
    }

    fn near(found: &Fit, expected: &Fit, tolerance: f64) {
        for (found, expected) in found.0.iter().zip(expected.0) {
            assert!((found - expected).abs() <= tolerance * expected, "{found} for {expected}");
        }
    }

    #[test]
    fn exact_times_give_back_their_coefficients() {
        let points: Vec<_> = works().into_iter().map(|work| (work, TRUE.seconds(&work))).collect();
        let fit = Fit::of(&points).unwrap();
        near(&fit, &TRUE, 1e-6);
        assert!((fit.request_s() - 5e-3).abs() < 1e-8);
        assert!((fit.profile().decode_s_per_context_token - 2e-6).abs() < 1e-11);
    }

    #[test]
    fn noise_of_a_percent_moves_the_fitted_times_by_no_more() {
        let noise = [1.01, 0.99, 1.005, 0.995];
        let works = works();
        let points: Vec<_> = works
            .iter()
            .enumerate()
            .map(|(i, work)| (*work, TRUE.seconds(work) * noise[i * 7 % noise.len()]))
            .collect();
        let fit = Fit::of(&points).unwrap();
        for work in &works {
            let (fitted, expected) = (fit.seconds(work), TRUE.seconds(work));
            assert!((fitted / expected - 1.0).abs() < 0.015, "{fitted} for {expected}");
        }
    }

    #[test]
    fn no_coefficient_is_negative_and_a_free_one_is_zero() {
        // Decoding gets cheaper with context: the best that is allowed is not to depend on it.
        let points: Vec<_> = works()
            .into_iter()
            .map(|work| (work, TRUE.seconds(&work) - 3e-6 * work[4]))
            .filter(|point| point.1 > 0.0)
            .collect();
        let fit = Fit::of(&points).unwrap();
        assert!(fit.0.iter().all(|&x| x >= 0.0), "{fit:?}");
        assert_eq!(fit.profile().decode_s_per_context_token, 0.0);
        let free = Fit([1e-3, 1e-4, 0.0, 1e-4, 0.0, 0.0]);
        let points: Vec<_> = works().into_iter().map(|work| (work, free.seconds(&work))).collect();
        let found = Fit::of(&points).unwrap();
        assert!(found.0.iter().zip(free.0).all(|(a, b)| (a - b).abs() < 1e-9), "{found:?}");
        assert_eq!(Fit::of(&[]), None);
    }

    #[test]
    fn a_prompt_is_computed_in_chunks_each_of_which_sees_all_before_it() {
        assert_eq!(prompt_work(100, 512), [1.0, 100.0, 5000.0, 0.0, 0.0, 1.0]);
        assert_eq!(prompt_work(8, 4), [2.0, 8.0, 4.0 * 2.0 + 4.0 * 6.0, 0.0, 0.0, 1.0]);
        assert_eq!(prompt_work(5, 4), [2.0, 4.0, 8.0, 1.0, 5.0, 1.0], "a last token alone is a decode step");
    }
}
