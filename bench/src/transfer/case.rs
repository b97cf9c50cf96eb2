//! Which bytes a transfer of a shape covers. Pure.

use clap::ValueEnum;
use kernels::{KvDtype, KvLayout};
use serde::{Deserialize, Serialize};
use transfer::Span;

use super::Args;

/// What one descriptor covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
pub enum Shape {
    /// All blocks, which lie next to each other on both sides.
    Span,
    /// A block; no two are neighbours on both sides.
    Block,
    /// One layer of a block.
    Layer,
    /// 32 KiB: what a layer's keys (or values) of a block of Qwen3-0.6B have, as vLLM lays them out.
    #[value(name = "32k")]
    Vllm,
}

impl Shape {
    pub fn name(self) -> &'static str {
        match self {
            Self::Span => "span",
            Self::Block => "block",
            Self::Layer => "layer",
            Self::Vllm => "32k",
        }
    }
}

/// The sizes of a model's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    pub layers: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub block_size: u32,
}

const VLLM_BYTES: u64 = 32 << 10;

impl Geometry {
    pub fn of(args: &Args) -> Self {
        let &Args { layers, kv_heads, head_dim, block_size, .. } = args;
        Self { layers, kv_heads, head_dim, block_size }
    }

    pub fn blocks(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }

    /// Keys and values of one layer, two bytes an element.
    pub fn layer_bytes(&self) -> u64 {
        2 * 2 * u64::from(self.kv_heads) * u64::from(self.head_dim) * u64::from(self.block_size)
    }

    pub fn block_bytes(&self) -> u64 {
        self.layer_bytes() * u64::from(self.layers)
    }

    /// The same as a KV pool has it.
    pub fn layout(&self) -> KvLayout {
        KvLayout {
            num_layers: self.layers as usize,
            num_kv_heads: self.kv_heads as usize,
            head_dim: self.head_dim as usize,
            block_size: self.block_size as usize,
            dtype: KvDtype::Bf16,
        }
    }

    /// The spans of a transfer of this shape between the first `blocks` blocks of both pools.
    pub fn spans(&self, shape: Shape, blocks: u32) -> Vec<Span> {
        let block_bytes = self.block_bytes();
        let piece = match shape {
            Shape::Span => return vec![Span { local: 0, remote: 0, len: u64::from(blocks) * block_bytes }],
            Shape::Block => block_bytes,
            Shape::Layer => self.layer_bytes(),
            Shape::Vllm => VLLM_BYTES.min(block_bytes),
        };
        let of_block = |block: u32| {
            let (local, remote) =
                (u64::from(block) * block_bytes, u64::from(scattered(block, blocks)) * block_bytes);
            let pieces = block_bytes.div_ceil(piece);
            (0..pieces).map(move |i| {
                let len = piece.min(block_bytes - i * piece);
                Span { local: local + i * piece, remote: remote + i * piece, len }
            })
        };
        (0..blocks).flat_map(of_block).collect()
    }
}

/// Where block `index` of `count` lies on the other side: a permutation that leaves no two neighbours together.
fn scattered(index: u32, count: u32) -> u32 {
    let coprime = |step: &u32| gcd(*step, count) == 1;
    // From the golden ratio on; 1 would leave all of them together, and count - 1 only reverses them.
    let step =
        ((count as f64 * 0.618) as u32 + 2..count).find(coprime).unwrap_or(count.saturating_sub(1).max(1));
    (u64::from(index) * u64::from(step) % u64::from(count)) as u32
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN3: Geometry = Geometry { layers: 28, kv_heads: 8, head_dim: 128, block_size: 16 };

    #[test]
    fn sizes_are_those_of_qwen3() {
        assert_eq!((QWEN3.layer_bytes(), QWEN3.block_bytes()), (65_536, 1_835_008));
        assert_eq!(QWEN3.layout().block_bytes(), 1_835_008);
        assert_eq!(QWEN3.blocks(1040), 65);
        let counts = [Shape::Span, Shape::Block, Shape::Layer, Shape::Vllm].map(|s| QWEN3.spans(s, 65).len());
        assert_eq!(counts, [1, 65, 1820, 3640]);
    }

    #[test]
    fn every_shape_covers_every_byte_once() {
        for shape in [Shape::Span, Shape::Block, Shape::Layer, Shape::Vllm] {
            for blocks in [1, 2, 3, 8, 65, 512] {
                let total = u64::from(blocks) * QWEN3.block_bytes();
                for side in [|s: &Span| s.local, |s: &Span| s.remote] {
                    let mut ranges: Vec<_> =
                        QWEN3.spans(shape, blocks).iter().map(|s| (side(s), s.len)).collect();
                    ranges.sort_unstable();
                    let end =
                        ranges.iter().fold(0, |end, &(at, len)| if at == end { at + len } else { u64::MAX });
                    assert_eq!(end, total, "{shape:?} of {blocks}");
                }
            }
        }
    }

    #[test]
    fn no_two_blocks_are_neighbours_on_both_sides() {
        for blocks in [8, 65, 512, 513] {
            let spans = QWEN3.spans(Shape::Block, blocks);
            assert!(spans.windows(2).all(|w| w[1].remote != w[0].remote + w[0].len), "{blocks}");
        }
    }
}
