//! The shape of one step: ragged sequences packed into one batch.

/// One sequence's part of a packed batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeqSpan {
    /// First packed row of this sequence.
    pub q_start: usize,
    /// Rows (new tokens) of this sequence in the batch.
    pub q_len: usize,
    /// Tokens that the last of these rows sees, itself included.
    pub context_len: usize,
    /// Where this sequence's blocks start in [`BatchMeta::block_tables`]; `ceil(context_len / block_size)` follow.
    pub table_start: usize,
}

/// Where the tokens of a packed batch are: everything the kernels need beside the activations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchMeta {
    /// Position in its sequence of each packed row.
    pub positions: Vec<u32>,
    /// `block * block_size + offset` that receives each row's K and V.
    pub slot_mapping: Vec<u64>,
    pub seqs: Vec<SeqSpan>,
    /// The sequences' block tables, one after another.
    pub block_tables: Vec<u32>,
}

impl BatchMeta {
    /// Packed rows.
    pub fn num_tokens(&self) -> usize {
        self.positions.len()
    }

    /// Appends a sequence whose tokens `computed..computed + q_len` are new. `table` covers all `computed + q_len` tokens.
    pub fn push(&mut self, table: &[u32], computed: usize, q_len: usize, block_size: usize) {
        self.push_blocks(table.iter().copied(), computed, q_len, block_size);
    }

    /// [`Self::push`] for a table of the caller's own type.
    pub fn push_blocks(
        &mut self,
        table: impl ExactSizeIterator<Item = u32>,
        computed: usize,
        q_len: usize,
        block_size: usize,
    ) {
        let context_len = computed + q_len;
        let blocks = context_len.div_ceil(block_size);
        assert!(
            table.len() >= blocks && q_len > 0,
            "block table {} < {blocks} blocks. This is a bug.",
            table.len()
        );
        let table_start = self.block_tables.len();
        self.seqs.push(SeqSpan { q_start: self.positions.len(), q_len, context_len, table_start });
        self.block_tables.extend(table.take(blocks));
        let table = &self.block_tables[table_start..];
        for position in computed..context_len {
            self.positions.push(position as u32);
            let block = table[position / block_size] as u64;
            self.slot_mapping.push(block * block_size as u64 + (position % block_size) as u64);
        }
    }
}
