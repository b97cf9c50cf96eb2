//! Faults planted in the sources must be found: by a wrong result, by the emulator's own checks, or by a crash, in some
//! schedule. Each is tried in a process of its own.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use kernels::cuda::Gpu;
use kernels::cuda::emulator::Mutation;

use crate::attention::{case, error};
use crate::linear::fused_errors;
use crate::pointwise::rms_norm_error;
use crate::support::*;

/// What shows a fault: the kernels that it needs, and a check that is true of a faulty device.
type Check = (&'static [&'static str], fn(&Gpu) -> bool);

const ATTENTION: Check = (&["decode.cu", "prefill.cu"], attention_is_wrong);
const WEIGHTS: Check = (&["prefill.cu"], prefills_weights_are_wrong);
const PRODUCTS: Check = (&["skinny.cu"], products_are_wrong);
const NORMS: Check = (&["norm.cu"], norms_are_wrong);

/// True if some schedule shows the fault.
fn is_found(mutation: Mutation, (files, wrong): Check) -> bool {
    SCHEDULES.iter().any(|schedule| wrong(&faulty(mutation, files, *schedule)))
}

/// Set in the process that tries a fault.
const TRYING: &str = "KVFERRY_TEST_FAULT";

/// Asserts that the test `name`, in a process of its own, finds the mutation.
fn assert_found(name: &str, mutation: Mutation, check: Check) {
    if runs_on_gpu() {
        return;
    }
    if std::env::var_os(TRYING).is_some() {
        assert!(is_found(mutation, check), "{mutation:?} was not found");
        return;
    }
    let child = Command::new(std::env::current_exe().expect("this program has a path"))
        .args(["--exact", &format!("faults::{name}")])
        .env(TRYING, "1")
        .output()
        .expect("this program starts again");
    // A wild address ends the process, as it ends a CUDA context.
    let crashed = child.status.signal() == Some(libc::SIGSEGV);
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(crashed || (child.status.success() && text.contains("1 passed")), "{text}");
}

fn attention_is_wrong(gpu: &Gpu) -> bool {
    let cases = [case(&[(299, 1), (30, 1)], 4, layout(2, 64, 16)), case(&[(17, 190)], 4, layout(2, 64, 16))];
    cases.iter().any(|case| error(gpu, case, false).map_or(true, |error| error > BF16))
}

/// Single rows through the kernel for many.
fn prefills_weights_are_wrong(gpu: &Gpu) -> bool {
    let case = case(&[(126, 1), (127, 1), (128, 1), (299, 1)], 4, layout(2, 128, 16));
    error(gpu, &case, true).map_or(true, |error| error > BF16)
}

fn products_are_wrong(gpu: &Gpu) -> bool {
    fused_errors(gpu, (3, 40, 352)).map_or(true, |(stored, silu)| stored > BF16 || silu > BF16)
}

fn norms_are_wrong(gpu: &Gpu) -> bool {
    rms_norm_error(gpu, 2, 1024, None).map_or(true, |error| error > BF16)
}

macro_rules! fault {
    ($name:ident, $file:literal, $from:literal => $to:literal, $check:expr) => {
        #[test]
        fn $name() {
            assert_found(stringify!($name), Mutation { file: $file, from: $from, to: $to }, $check);
        }
    };
}

fault!(a_barrier_removed_from_decode_is_found, "decode.cu", "    __syncthreads();\n    for (int i" => "    for (int i", ATTENTION);
fault!(a_barrier_removed_from_prefills_queries_is_found, "prefill.cu", "    copy_wait<1>();\n    __syncthreads();\n    uint32_t q" => "    copy_wait<1>();\n    uint32_t q", ATTENTION);
fault!(a_barrier_removed_before_the_next_tile_is_found, "prefill.cu", "overwrites it.\n        __syncthreads();" => "overwrites it.", ATTENTION);
fault!(a_copy_that_is_not_waited_for_is_found, "prefill.cu", "copy_wait<0>();" => "", ATTENTION);
fault!(an_off_by_one_block_is_found, "decode.cu", "table[token / p.pool.block_size]" => "table[(token + 1) / p.pool.block_size]", ATTENTION);
fault!(an_off_by_one_block_in_prefill_is_found, "prefill.cu", "table[token / p.pool.block_size]" => "table[(token + 1) / p.pool.block_size]", ATTENTION);
fault!(a_wrong_causal_mask_is_found, "prefill.cu", "before + at / group + 1 : 0" => "before + at / group + 2 : 0", ATTENTION);
fault!(a_forgotten_context_is_found, "prefill.cu", "visible[i] = at < lanes ? before +" => "visible[i] = at < lanes ? 0 *", ATTENTION);
fault!(attentions_weights_rounded_to_bf16_are_found, "prefill.cu", "left[i] = pack_left(a[i], low, high);" => "left[i] = 0;", WEIGHTS);
fault!(a_wrong_kv_head_is_found, "decode.cu", "token % p.pool.block_size, kv_head)" => "token % p.pool.block_size, 0)", ATTENTION);
fault!(a_split_that_forgets_its_weight_is_found, "decode.cu", "total += stat[1] * weight" => "total += stat[1]", ATTENTION);
fault!(a_barrier_removed_from_products_is_found, "skinny.cu", "    __syncthreads();\n" => "", PRODUCTS);
fault!(a_warp_left_out_of_a_product_is_found, "skinny.cu", "w < WARPS; w++)\n#pragma" => "w < WARPS - 1; w++)\n#pragma", PRODUCTS);
fault!(a_norm_that_misses_a_lane_is_found, "skinny.cu", "square += __shfl_xor_sync(ALL, square, 2);" => "", PRODUCTS);
fault!(a_barrier_removed_from_a_sum_is_found, "common.cuh", "    __syncthreads();\n    return warp_sum" => "    return warp_sum", NORMS);
fault!(a_divergent_barrier_is_found, "norm.cu", "const float scale" => "if (threadIdx.x == 5) return;\n    const float scale", NORMS);
