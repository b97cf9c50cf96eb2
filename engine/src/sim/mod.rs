//! `--device sim`: everything but the model's arithmetic is real.
//!
//! The KV of a token is a hash of the KV before it and of the token, read from the block table and written, repeated to
//! the full size of its rows, into the pool; the next token is a function of the last KV. So blocks are allocated,
//! cached, transferred and evicted as with a real model, wrong KV gives wrong tokens, and torn KV is an error. Only time is
//! made up: by a [`Profile`].

mod profile;

pub use profile::{ModelSize, Profile, ProfileError};

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::layout::Half;
use kernels::{KvPool, SeqSpan};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::api::{Logprobs, TokenId};
use crate::core::{Plan, SampleRow};
use crate::runner::{Progress, Runner};
use crate::sampler::Sampled;

/// One token in this many would end a text: about the length of chat answers.
const MEAN_ANSWER: u64 = 256;

/// Layers that end within this time end together.
const SHORTEST_NAP: Duration = Duration::from_millis(1);

/// A runner whose steps take as long as `profile` says, divided by `speed`.
pub struct SimRunner {
    pool: Arc<KvPool>,
    profile: Profile,
    speed: f64,
    /// Tokens that may be sampled, the end-of-sequence token apart.
    tokens: Vec<TokenId>,
    eos: Option<TokenId>,
}

impl SimRunner {
    /// `tokens` must not be empty; `speed` above 1 compresses time.
    pub fn new(
        pool: Arc<KvPool>,
        profile: Profile,
        speed: f64,
        tokens: Vec<TokenId>,
        eos: Option<TokenId>,
    ) -> Self {
        assert!(!tokens.is_empty() && speed > 0.0, "a simulation needs tokens and a speed. This is a bug.");
        Self { pool, profile, speed, tokens, eos }
    }

    /// Computes one sequence's rows; the KV of each.
    fn rows(&self, plan: &Plan, seq: &SeqSpan) -> Result<Vec<u64>, String> {
        let block_size = self.pool.layout().block_size;
        let table = &plan.meta.block_tables[seq.table_start..];
        let slot = |position: usize| (table[position / block_size], position % block_size);
        let first = seq.context_len - seq.q_len;
        let mut before = match first {
            0 => 0,
            _ => self.read(slot(first - 1))?,
        };
        let mut rows = Vec::with_capacity(seq.q_len);
        for row in seq.q_start..seq.q_start + seq.q_len {
            before = token_kv(before, plan.tokens[row]);
            self.write(slot(plan.meta.positions[row] as usize), before);
            rows.push(before);
        }
        Ok(rows)
    }

    fn write(&self, (block, offset): (u32, usize), kv: u64) {
        self.each_row(block, offset, |row| {
            row.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&kv.to_le_bytes()))
        });
    }

    /// The KV of a token. Errors: its rows do not all say the same, so not all bytes arrived.
    fn read(&self, (block, offset): (u32, usize)) -> Result<u64, String> {
        let mut found: Option<[u8; 8]> = None;
        let mut torn = false;
        self.each_row(block, offset, |row| {
            for word in row.as_chunks::<8>().0 {
                torn |= *found.get_or_insert(*word) != *word;
            }
        });
        match (found, torn) {
            (Some(word), false) => Ok(u64::from_le_bytes(word)),
            _ => Err(format!("the KV of block {block}, token {offset} is torn")),
        }
    }

    /// The token's rows of keys and values in every layer.
    fn each_row(&self, block: u32, offset: usize, mut visit: impl FnMut(&mut [u8])) {
        let layout = self.pool.layout();
        let bytes = layout.row() * layout.dtype.size();
        for layer in 0..layout.num_layers {
            for half in [Half::Key, Half::Value] {
                let start = self.pool.half_ptr(block, layer, half);
                // SAFETY: `offset < block_size`, so the row lies inside the half; the engine put only blocks of this
                // batch into the plan: those written belong to it, and nobody writes those that are read.
                visit(unsafe { std::slice::from_raw_parts_mut(start.add(offset * bytes), bytes) });
            }
        }
    }

    fn sample(&self, kv: u64, row: &SampleRow) -> Sampled {
        // Greedy requests ignore the seed, as with a model.
        let chosen = if row.params.temperature == 0.0 { kv } else { token_kv(kv, row.seed as TokenId) };
        let ends = chosen.is_multiple_of(MEAN_ANSWER) && row.suppressed.is_empty();
        let token = match self.eos {
            Some(eos) if ends => eos,
            _ => self.tokens[(chosen / MEAN_ANSWER) as usize % self.tokens.len()],
        };
        let logprobs = row.params.logprobs.map(|count| {
            let top = if count == 0 { Vec::new() } else { vec![(token, 0.0)] };
            Box::new(Logprobs { logprob: 0.0, top })
        });
        Sampled { token, logprobs }
    }
}

impl Runner for SimRunner {
    fn run(&mut self, plan: &Plan, progress: Progress<'_>) -> Result<Vec<Result<Sampled, String>>, String> {
        let started = Instant::now();
        let rows =
            plan.meta.seqs.iter().map(|seq| self.rows(plan, seq)).collect::<Result<Vec<_>, _>>()?.concat();
        let sampled = plan.samples.iter().map(|row| Ok(self.sample(rows[row.row as usize], row))).collect();
        let target = self.profile.step(&plan.meta).div_f64(self.speed);
        let layers = self.pool.layout().num_layers;
        // A layer of a model ends as often, but sleeps shorter than this would cost more than they take.
        let naps = ((target.as_nanos() / SHORTEST_NAP.as_nanos()) as usize).clamp(1, layers);
        for nap in 1..=naps {
            let until = target.mul_f64(nap as f64 / naps as f64);
            std::thread::sleep(until.saturating_sub(started.elapsed()));
            progress(layers * nap / naps);
        }
        Ok(sampled)
    }
}

/// The KV of `token` after `before`. Never 0, which stands for nothing before.
fn token_kv(before: u64, token: TokenId) -> u64 {
    xxh3_64_with_seed(&token.to_le_bytes(), before) | 1
}

#[cfg(test)]
mod tests {
    use kernels::{BatchMeta, KvDtype, KvLayout};

    use super::*;
    use crate::api::SamplingParams;

    fn runner() -> SimRunner {
        let layout =
            KvLayout { num_layers: 2, num_kv_heads: 2, head_dim: 8, block_size: 4, dtype: KvDtype::Bf16 };
        let pool = Arc::new(KvPool::new(layout, 8).unwrap());
        SimRunner::new(pool, Profile::instant(), 1.0, (10..90).collect(), Some(2))
    }

    fn step(
        runner: &mut SimRunner,
        table: &[u32],
        computed: usize,
        tokens: &[TokenId],
    ) -> Result<TokenId, String> {
        let mut meta = BatchMeta::default();
        meta.push(table, computed, tokens.len(), 4);
        let row = SampleRow {
            row: tokens.len() as u32 - 1,
            params: SamplingParams::default(),
            seed: 0,
            index: 0,
            history: vec![],
            prompt_len: 0,
            suppressed: vec![],
        };
        let plan = Plan { items: vec![], tokens: tokens.to_vec(), meta, samples: vec![row] };
        runner.run(&plan, &mut |_| ()).map(|sampled| sampled[0].as_ref().unwrap().token)
    }

    #[test]
    fn the_next_token_depends_on_all_tokens_before_whatever_the_chunks_and_blocks() {
        let tokens = [5, 6, 7, 8, 9, 10];
        let whole = step(&mut runner(), &[0, 1], 0, &tokens).unwrap();
        for cut in 1..tokens.len() {
            let mut runner = runner();
            step(&mut runner, &[7, 3], 0, &tokens[..cut]).unwrap();
            assert_eq!(step(&mut runner, &[7, 3], cut, &tokens[cut..]).unwrap(), whole, "cut at {cut}");
        }
        assert_ne!(step(&mut runner(), &[0, 1], 0, &[4, 6, 7, 8, 9, 10]).unwrap(), whole);
    }

    #[test]
    fn torn_kv_is_an_error() {
        let mut runner = runner();
        step(&mut runner, &[0, 1], 0, &[5, 6, 7, 8]).unwrap();
        let last = runner.pool.half_ptr(0, 1, Half::Value);
        // SAFETY: byte 3 of token 3's values in the last layer, of a pool that only this test uses.
        unsafe { *last.add(3 * 32 + 3) ^= 1 };
        assert_eq!(step(&mut runner, &[0, 1], 4, &[9]).unwrap_err(), "the KV of block 0, token 3 is torn");
    }
}
