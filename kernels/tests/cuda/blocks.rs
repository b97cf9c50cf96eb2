use half::bf16;
use kernels::cuda::PoolView;
use kernels::cuda::blocks::{Side, copy_blocks, reshape_and_cache};
use kernels::layout::Half;

use crate::support::*;

#[test]
fn rows_reach_their_slots_and_nothing_else() {
    on_every_device(|gpu| {
        let layout = layout(2, 32, 4);
        let (rows, row) = (5, layout.row());
        let (keys, values) = (random(rows * row, 1), random(rows * row, 2));
        let slots = [9i64, -1, 0, 19, 4];
        let pool = gpu.zeroed(5 * layout.block_bytes()).unwrap();
        let (k, v) = (upload_bf16(gpu, &keys), upload_bf16(gpu, &values));
        let view = PoolView { view: pool.view(), layout };
        let slot_ids = gpu.buffer_of(&slots).unwrap();
        reshape_and_cache(gpu, (k.view(), v.view()), slot_ids.view(), &view, 1, rows).unwrap();
        let mut exact = vec![bf16::ZERO; 5 * layout.block_bytes() / 2];
        for (i, slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            for (half, from) in [(Half::Key, &keys), (Half::Value, &values)] {
                let start = layout.half((slot / 4) as u32, 1, half).start / 2 + (slot % 4) as usize * row;
                exact[start..start + row].copy_from_slice(&bf16s(&from[i * row..(i + 1) * row]));
            }
        }
        assert_eq!(pool.to_vec::<bf16>().unwrap(), exact);
    });
}

#[test]
fn blocks_are_gathered_and_scattered_whole() {
    on_every_device(|gpu| {
        for bytes in [16, 4096 + 48] {
            let from: Vec<u8> = (0..7 * bytes).map(|i| (i * 31 % 251) as u8).collect();
            let (pool, ids) = (gpu.buffer_of(&from).unwrap(), [6i32, 2, 0]);
            let named = gpu.buffer_of(&ids).unwrap();
            let staging = gpu.zeroed(3 * bytes).unwrap();
            let (of_pool, of_staging) = (
                Side { blocks: pool.view(), ids: Some(named.view()) },
                Side { blocks: staging.view(), ids: None },
            );
            copy_blocks(gpu, of_staging, of_pool, 3, bytes).unwrap();
            let block = |of: &[u8], id: i32| of[id as usize * bytes..][..bytes].to_vec();
            let gathered: Vec<u8> = ids.iter().flat_map(|id| block(&from, *id)).collect();
            assert_eq!(staging.to_vec::<u8>().unwrap(), gathered);
            let other = gpu.zeroed(7 * bytes).unwrap();
            copy_blocks(gpu, Side { blocks: other.view(), ids: Some(named.view()) }, of_staging, 3, bytes)
                .unwrap();
            let scattered = other.to_vec::<u8>().unwrap();
            for id in 0..7 {
                let expected = if ids.contains(&id) { block(&from, id) } else { vec![0; bytes] };
                assert_eq!(block(&scattered, id), expected, "block {id} of {bytes} bytes");
            }
        }
    });
}
