//! The pool against a model that is a list of blocks and does everything by search.

use proptest::prelude::*;

use super::*;
use crate::hash;

#[derive(Clone, Debug, Default)]
struct ModelBlock {
    holders: u32,
    /// The whole prefix that the block ends.
    content: Option<Vec<TokenId>>,
}

/// Blocks, and the reusable ones in the order of their reuse.
#[derive(Debug)]
struct Model {
    blocks: Vec<ModelBlock>,
    reusable: Vec<u32>,
}

impl Model {
    fn new(num_blocks: usize) -> Self {
        Self { blocks: vec![ModelBlock::default(); num_blocks], reusable: (0..num_blocks as u32).collect() }
    }

    fn find(&self, prefix: &[TokenId]) -> Option<BlockId> {
        let at = self.blocks.iter().position(|block| block.content.as_deref() == Some(prefix));
        at.map(|at| BlockId(at as u32))
    }

    fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        let taken: Vec<u32> =
            (count <= self.reusable.len()).then(|| self.reusable.drain(..count).collect())?;
        for &id in &taken {
            self.blocks[id as usize] = ModelBlock { holders: 1, content: None };
        }
        Some(taken.into_iter().map(BlockId).collect())
    }

    fn share(&mut self, id: BlockId) {
        self.reusable.retain(|&other| other != id.0);
        self.blocks[id.0 as usize].holders += 1;
    }

    fn seal(&mut self, id: BlockId, prefix: &[TokenId]) {
        if self.blocks[id.0 as usize].content.is_none() && self.find(prefix).is_none() {
            self.blocks[id.0 as usize].content = Some(prefix.to_vec());
        }
    }

    fn release(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.0 as usize];
        block.holders -= 1;
        match (block.holders, &block.content) {
            (0, Some(_)) => self.reusable.push(id.0),
            (0, None) => self.reusable.insert(0, id.0),
            _ => {}
        }
    }

    fn reset_cache(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.content = None);
    }

    fn account(&self) -> Account {
        let cached = |id: &&u32| self.blocks[**id as usize].content.is_some();
        let cached = self.reusable.iter().filter(cached).count();
        Account {
            free: self.reusable.len() - cached,
            cached,
            running: self.blocks.len() - self.reusable.len(),
            ..Account::default()
        }
    }
}

const BLOCK: usize = 2;

#[derive(Clone, Debug)]
enum Op {
    /// A prompt of full blocks: share what is cached, allocate and seal the rest.
    Admit(Vec<TokenId>),
    /// One of the chains that are held.
    Release(usize),
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    // Two kinds of token, so that chains share beginnings.
    let tokens = prop::collection::vec(0..2u32, 1..6)
        .prop_map(|blocks| blocks.iter().flat_map(|&token| [token; BLOCK]).collect());
    prop_oneof![8 => tokens.prop_map(Op::Admit), 6 => any::<usize>().prop_map(Op::Release), 1 => Just(Op::Reset)]
}

/// Name of the block that ends `prefix`, and its parent's.
fn names(prefix: &[TokenId]) -> (BlockHash, BlockHash) {
    let mut parent = hash::root(None);
    for block in prefix[..prefix.len() - BLOCK].chunks(BLOCK) {
        parent = hash::chain(parent, block);
    }
    (parent, hash::chain(parent, &prefix[prefix.len() - BLOCK..]))
}

fn admit(pool: &mut BlockPool, model: &mut Model, tokens: &[TokenId]) -> Option<Vec<BlockId>> {
    let mut table = Vec::new();
    let ends: Vec<usize> = (1..=tokens.len() / BLOCK).map(|blocks| blocks * BLOCK).collect();
    for &end in &ends {
        let (parent, hash) = names(&tokens[..end]);
        let found = pool.find(parent, hash, &tokens[end - BLOCK..end]);
        assert_eq!(found, model.find(&tokens[..end]), "looked for {:?}", &tokens[..end]);
        let Some(block) = found else { break };
        pool.share(block);
        model.share(block);
        table.push(block);
    }
    let missing = &ends[table.len()..];
    let fresh = pool.allocate(missing.len(), Holder::Running);
    assert_eq!(fresh, model.allocate(missing.len()));
    let Some(fresh) = fresh else {
        pool.release_chain(&table);
        table.iter().rev().for_each(|&block| model.release(block));
        return None;
    };
    for (&end, &block) in missing.iter().zip(&fresh) {
        let (parent, hash) = names(&tokens[..end]);
        pool.seal(block, parent, hash, &tokens[end - BLOCK..end]);
        model.seal(block, &tokens[..end]);
    }
    table.extend(fresh);
    Some(table)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_pool_finds_evicts_and_counts_as_a_list_would(
        num_blocks in 1..14usize,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let (mut pool, mut model) = (BlockPool::new(num_blocks), Model::new(num_blocks));
        let mut held: Vec<Vec<BlockId>> = Vec::new();
        for op in ops {
            match op {
                Op::Admit(tokens) => held.extend(admit(&mut pool, &mut model, &tokens)),
                Op::Release(which) if !held.is_empty() => {
                    let table = held.swap_remove(which % held.len());
                    pool.release_chain(&table);
                    table.iter().rev().for_each(|&block| model.release(block));
                }
                Op::Release(_) => {}
                Op::Reset => {
                    pool.reset_cache();
                    model.reset_cache();
                }
            }
            pool.check();
            prop_assert_eq!(pool.account(), model.account());
        }
    }
}
