//! The block-major KV layout: `[block][layer][K|V][token][head][dim]`.

use std::ops::Range;

/// Element type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    Bf16,
    /// Exact for f32 activations: for tests, at twice the bytes.
    F32,
}

impl KvDtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            KvDtype::Bf16 => 2,
            KvDtype::F32 => 4,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            KvDtype::Bf16 => "bf16",
            KvDtype::F32 => "f32",
        }
    }
}

/// Key or value half of a layer's share of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    Key,
    Value,
}

/// Sizes that fix where every byte of the cache is.
///
/// One whole block is contiguous, so it is one span to transfer; one layer of a block is contiguous within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    pub num_layers: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Tokens in a block.
    pub block_size: usize,
    pub dtype: KvDtype,
}

impl KvLayout {
    /// Elements of one token's keys (or values) in one layer.
    pub fn row(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Bytes of the keys (or values) of one block in one layer.
    pub fn half_bytes(&self) -> usize {
        self.block_size * self.row() * self.dtype.size()
    }

    /// Bytes of one layer of one block.
    pub fn layer_bytes(&self) -> usize {
        2 * self.half_bytes()
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.num_layers * self.layer_bytes()
    }

    /// Bytes of one token over all layers: 114,688 for Qwen3-0.6B in bf16.
    pub fn token_bytes(&self) -> usize {
        self.block_bytes() / self.block_size
    }

    /// Where a whole block is.
    pub fn block(&self, block: u32) -> Range<usize> {
        let start = block as usize * self.block_bytes();
        start..start + self.block_bytes()
    }

    /// Where the keys or values of one layer of a block are: `block_size` rows of [`Self::row`] elements.
    pub fn half(&self, block: u32, layer: usize, half: Half) -> Range<usize> {
        debug_assert!(layer < self.num_layers);
        let start = self.block(block).start
            + layer * self.layer_bytes()
            + if half == Half::Value { self.half_bytes() } else { 0 };
        start..start + self.half_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN3_0_6B: KvLayout =
        KvLayout { num_layers: 28, num_kv_heads: 8, head_dim: 128, block_size: 16, dtype: KvDtype::Bf16 };

    #[test]
    fn qwen3_0_6b_has_the_published_sizes() {
        assert_eq!(QWEN3_0_6B.token_bytes(), 114_688);
        assert_eq!(QWEN3_0_6B.block_bytes(), 1_835_008);
        assert_eq!(QWEN3_0_6B.layer_bytes(), 64 << 10);
    }

    #[test]
    fn halves_tile_a_block_without_gap_or_overlap() {
        let layout =
            KvLayout { num_layers: 3, num_kv_heads: 2, head_dim: 4, block_size: 8, dtype: KvDtype::F32 };
        for block in [0u32, 1, 7] {
            let mut at = layout.block(block).start;
            for layer in 0..3 {
                for half in [Half::Key, Half::Value] {
                    let span = layout.half(block, layer, half);
                    assert_eq!(span.start, at);
                    at = span.end;
                }
            }
            assert_eq!(at, layout.block(block).end);
        }
    }
}
