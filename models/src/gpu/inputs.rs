//! A step's numbers, packed into one upload.
//!
//! Offsets follow from the step's [`Shape`] alone, so a captured step finds them where they were.

use kernels::cuda::attention::{splits, tiles};
use kernels::cuda::sample::SampleParams;
use kernels::cuda::{Buffer, View};
use kernels::{BatchMeta, SeqSpan};

use crate::model::{Batch, Draw};

/// How much of everything there is; for a class, how much there may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shape {
    pub rows: usize,
    /// Sequences of one row.
    pub decode: usize,
    /// Their longest context.
    pub max_context: usize,
    /// Sequences of several rows.
    pub prefill: usize,
    pub tiles: usize,
    pub tables: usize,
    pub samples: usize,
}

/// Byte offsets of the parts.
#[derive(Clone, Copy, Debug)]
struct Offsets {
    slots: usize,
    params: usize,
    tokens: usize,
    positions: usize,
    decode: [usize; 4],
    prefill: [usize; 4],
    tiles: usize,
    samples: usize,
    tables: usize,
    end: usize,
}

impl Offsets {
    fn new(shape: &Shape) -> Self {
        let mut end = 0;
        let mut part = |count: usize, bytes: usize| {
            let start = end;
            // Kernels read some parts 16 bytes at a time.
            end = (end + count * bytes).next_multiple_of(16);
            start
        };
        let slots = part(shape.rows, size_of::<i64>());
        let params = part(shape.samples, size_of::<SampleParams>());
        let (tokens, positions) = (part(shape.rows, 4), part(shape.rows, 4));
        let decode = std::array::from_fn(|_| part(shape.decode, 4));
        let prefill = std::array::from_fn(|_| part(shape.prefill, 4));
        let (tiles, samples, tables) = (part(shape.tiles, 8), part(shape.samples, 4), part(shape.tables, 4));
        Self { slots, params, tokens, positions, decode, prefill, tiles, samples, tables, end }
    }
}

/// The parts on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct InputViews<'a> {
    pub slots: View<'a>,
    pub params: View<'a>,
    pub tokens: View<'a>,
    pub positions: View<'a>,
    /// Rows, contexts, starts of tables, starts of splits.
    pub decode: [View<'a>; 4],
    /// First rows, lengths, contexts, starts of tables.
    pub prefill: [View<'a>; 4],
    pub tiles: View<'a>,
    /// Rows whose token is sampled.
    pub samples: View<'a>,
    pub tables: View<'a>,
}

impl Shape {
    /// Bytes of an upload of this shape.
    pub fn bytes(&self) -> usize {
        Offsets::new(self).end
    }

    /// A batch's own.
    pub fn of(batch: &Batch, group: usize) -> Self {
        let (decode, prefill) = split(&batch.meta);
        let lengths: Vec<usize> = prefill.iter().map(|seq| seq.q_len).collect();
        Self {
            rows: batch.tokens.len(),
            decode: decode.len(),
            max_context: decode.iter().map(|seq| seq.context_len).max().unwrap_or(0),
            prefill: prefill.len(),
            tiles: tiles(&lengths, group).len(),
            tables: batch.meta.block_tables.len(),
            samples: batch.logits_rows.len(),
        }
    }

    pub fn views<'a>(&self, buffer: &'a Buffer) -> InputViews<'a> {
        let at = Offsets::new(self);
        let part = |start: usize, count: usize, bytes: usize| buffer.view().part(start, count * bytes);
        InputViews {
            slots: part(at.slots, self.rows, 8),
            params: part(at.params, self.samples, size_of::<SampleParams>()),
            tokens: part(at.tokens, self.rows, 4),
            positions: part(at.positions, self.rows, 4),
            decode: at.decode.map(|start| part(start, self.decode, 4)),
            prefill: at.prefill.map(|start| part(start, self.prefill, 4)),
            tiles: part(at.tiles, self.tiles, 8),
            samples: part(at.samples, self.samples, 4),
            tables: part(at.tables, self.tables, 4),
        }
    }
}

/// Sequences of one row, and of several.
fn split(meta: &BatchMeta) -> (Vec<&SeqSpan>, Vec<&SeqSpan>) {
    meta.seqs.iter().partition(|seq| seq.q_len == 1)
}

/// Writes a batch into `to` in the places of `shape`, which holds it; what is left of a class is padding. A row that
/// samples nothing on the device has no parameters. Returns the splits of all decoding sequences.
pub(super) fn pack(
    batch: &Batch,
    draws: &[Option<Draw>],
    shape: Shape,
    group: usize,
    to: &mut [u8],
) -> usize {
    let at = Offsets::new(&shape);
    assert!(at.end <= to.len(), "a step of {} bytes in {}. This is a bug.", at.end, to.len());
    let meta = &batch.meta;
    let (decode, prefill) = split(meta);
    let mut put = |start: usize, count: usize, values: &mut dyn Iterator<Item = i32>| {
        let to = bytemuck::cast_slice_mut::<u8, i32>(&mut to[start..start + 4 * count]);
        to.iter_mut().for_each(|to| *to = values.next().unwrap_or(0));
        assert!(values.next().is_none(), "a step does not fit its class {shape:?}. This is a bug.");
    };
    put(at.tokens, shape.rows, &mut batch.tokens.iter().map(|token| *token as i32));
    put(at.positions, shape.rows, &mut meta.positions.iter().map(|position| *position as i32));
    put(at.samples, shape.samples, &mut batch.logits_rows.iter().map(|row| *row as i32));
    put(at.tables, shape.tables, &mut meta.block_tables.iter().map(|block| *block as i32));
    let of: [fn(&SeqSpan) -> usize; 4] = [|s| s.q_start, |s| s.q_len, |s| s.context_len, |s| s.table_start];
    for (start, of) in at.prefill.into_iter().zip(of) {
        put(start, shape.prefill, &mut prefill.iter().map(|seq| of(seq) as i32));
    }
    for (start, of) in at.decode.into_iter().zip([of[0], of[2], of[3]]) {
        put(start, shape.decode, &mut decode.iter().map(|seq| of(seq) as i32));
    }
    let mut total = 0;
    let starts: Vec<i32> = decode
        .iter()
        .map(|seq| {
            let start = total as i32;
            total += splits(seq.context_len);
            start
        })
        .collect();
    put(at.decode[3], shape.decode, &mut starts.into_iter());
    let lengths: Vec<usize> = prefill.iter().map(|seq| seq.q_len).collect();
    put(at.tiles, 2 * shape.tiles, &mut tiles(&lengths, group).into_iter().flatten());
    let slots = bytemuck::cast_slice_mut::<u8, i64>(&mut to[at.slots..at.slots + 8 * shape.rows]);
    let mut known = meta.slot_mapping.iter().map(|slot| *slot as i64);
    slots.iter_mut().for_each(|slot| *slot = known.next().unwrap_or(-1));
    let bytes = size_of::<SampleParams>() * shape.samples;
    let params = bytemuck::cast_slice_mut::<u8, SampleParams>(&mut to[at.params..at.params + bytes]);
    let mut asked = draws.iter().map(|draw| draw.as_ref().map_or(GREEDY, Draw::params));
    params.iter_mut().for_each(|params| *params = asked.next().unwrap_or(GREEDY));
    total
}

const GREEDY: SampleParams =
    SampleParams { uniform: 0.0, temperature: 0.0, floor: -40.0, top_p: 1.0, top_k: 0 };
