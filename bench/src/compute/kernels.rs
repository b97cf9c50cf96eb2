//! `bench kernels`: every kernel beside the roof of the machine that it runs on.

use std::path::PathBuf;
use std::sync::Arc;

use half::bf16;
use kernels::cpu::arena::Arena;
use kernels::cpu::{Attention, Input, Isa, Output, Packed, Precision, matmul, pointwise, qkv};
use kernels::{BatchMeta, KvDtype, KvLayout, KvPool};
use serde::Serialize;

use super::roofs::{Measured, Roofs, name};
use super::{Cpu, Report, aside, seconds};
use crate::error::{BenchError, Result};
use crate::machine;
use crate::output::write_json;
use crate::table::Table;

/// Measure every kernel on the shapes of Qwen3-0.6B, beside what this machine's memory and arithmetic can do.
///
/// Kernels and roofs are measured in turns and the best of each counts, so that a machine that is busy for a while is so
/// for both.
#[derive(Clone, Debug, clap::Args, Serialize)]
#[command(after_long_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    cpu: Cpu,
    /// Rounds; the best counts.
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = super::at_least_one)]
    rounds: usize,
    /// Only kernels whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Write the results to this file.
    #[arg(long, value_name = "FILE", value_parser = crate::output::file)]
    json: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
The roof of a kernel that reads memory once is reading memory in order (GB/s); of one that computes, its instructions on \
registers alone (GFLOP/s, for int8 GOP/s). A kernel whose data stays in a cache can exceed the former. Attention's \
operations are those of the keys that a row sees. Without --cpu-isa products are measured on every instruction set that \
the CPU has.

Examples:
  bench kernels
  bench kernels --cpu-isa avx2 --only product --json avx2.json";

const HEADS: usize = 16;
const LAYOUT: KvLayout =
    KvLayout { num_layers: 1, num_kv_heads: 8, head_dim: 128, block_size: 16, dtype: KvDtype::Bf16 };
const HIDDEN: usize = 1024;
const MLP: usize = 3072;
/// Rows of the head that are enough to be read from memory; all 151,936 would take longer and say the same.
const VOCABULARY: usize = 65_536;

/// What a kernel's time is compared with.
#[derive(Clone, Copy, Debug)]
enum Work {
    Bytes(f64),
    Operations(f64, Isa, Precision),
}

struct Case {
    name: String,
    isa: Isa,
    work: Work,
    run: Box<dyn FnMut()>,
}

/// One kernel's result.
#[derive(Clone, Debug, Serialize)]
struct Row {
    kernel: String,
    isa: &'static str,
    ms: f64,
    /// GB/s or GFLOP/s.
    rate: f64,
    unit: &'static str,
    roof: f64,
    share_of_roof: f64,
}

#[derive(Debug, Serialize)]
struct Results {
    roofs: Measured,
    kernels: Vec<Row>,
}

/// Measures and prints.
pub async fn run(args: Args) -> Result<()> {
    aside(move || measure(&args)).await
}

fn measure(args: &Args) -> Result<()> {
    let load = machine::load();
    let isa = args.cpu.start()?;
    let mut roofs = Roofs::new()?;
    let mut cases = cases(args, isa).map_err(BenchError::io("memory for the kernels' operands"))?;
    let mut best = vec![f64::INFINITY; cases.len()];
    for _ in 0..args.rounds {
        for (case, best) in cases.iter_mut().zip(&mut best) {
            match case.work {
                Work::Bytes(_) => roofs.read(),
                Work::Operations(_, isa, precision) => roofs.compute(isa, precision),
            };
            *best = best.min(seconds(&mut case.run));
        }
    }
    let rows: Vec<Row> =
        cases.iter().zip(best).map(|(case, seconds)| row(case, seconds, &mut roofs)).collect();
    print(&rows, &roofs.measured());
    let results = Results { roofs: roofs.measured(), kernels: rows };
    write_json(args.json.as_deref(), &Report::new(args.clone(), isa, load, results))
}

fn row(case: &Case, seconds: f64, roofs: &mut Roofs) -> Row {
    let (work, unit, roof) = match case.work {
        Work::Bytes(bytes) => (bytes, "GB/s", roofs.read()),
        Work::Operations(operations, isa, precision) => {
            let unit = if precision == Precision::Int8 { "GOP/s" } else { "GFLOP/s" };
            (operations, unit, roofs.compute(isa, precision))
        }
    };
    let rate = work / seconds / 1e9;
    let share_of_roof = rate / roof;
    Row {
        kernel: case.name.clone(),
        isa: case.isa.as_str(),
        ms: seconds * 1e3,
        rate,
        unit,
        roof,
        share_of_roof,
    }
}

fn print(rows: &[Row], roofs: &Measured) {
    println!("memory: {:.1} GB/s read in order", roofs.read_gb_s);
    for peak in &roofs.compute {
        println!("arithmetic: {:.0} GFLOP/s {} on {}", peak.gflop_s, peak.precision, peak.isa);
    }
    let mut table = Table::new(&["<kernel", "<isa", "ms", "rate", "<unit", "roof", "%"]);
    for row in rows {
        table.row([
            row.kernel.clone(),
            row.isa.to_owned(),
            format!("{:.3}", row.ms),
            format!("{:.1}", row.rate),
            row.unit.to_owned(),
            format!("{:.1}", row.roof),
            format!("{:.0}", row.share_of_roof * 100.0),
        ]);
    }
    print!("\n{table}");
}

fn cases(args: &Args, chosen: Isa) -> std::io::Result<Vec<Case>> {
    let wanted = |case: &Case| args.only.as_ref().is_none_or(|only| case.name.contains(only.as_str()));
    let isas: Vec<Isa> = match args.cpu.cpu_isa {
        Some(isa) => vec![isa],
        None => Isa::available().collect(),
    };
    let mut cases = products(&isas)?;
    for &isa in &isas {
        cases.extend([512, 1500, 3000].map(|tokens| attention(isa, &[(0, tokens)])));
        cases.extend(
            [(1, 512), (8, 512), (1, 8192)].map(|(n, context)| attention(isa, &vec![(context - 1, 1); n])),
        );
    }
    cases.extend(pointwise_cases(chosen));
    cases.retain(wanted);
    Ok(cases)
}

/// The products of a layer and of the head, few rows and many.
fn products(isas: &[Isa]) -> std::io::Result<Vec<Case>> {
    let mut cases = Vec::new();
    for precision in [Precision::Bf16, Precision::Int8] {
        let mut arena = Arena::default();
        let weights = |n: usize, k: usize| values(n * k);
        let pack = |arena: &mut Arena, n: usize, k: usize| {
            Packed::new(arena, &[bytemuck::cast_slice(&weights(n, k))], k, precision).map(Arc::new)
        };
        let head = pack(&mut arena, VOCABULARY, HIDDEN)?;
        let qkv = pack(&mut arena, 4 * HIDDEN, HIDDEN)?;
        let down = pack(&mut arena, HIDDEN, MLP)?;
        let half = weights(MLP, HIDDEN);
        let half: &[u8] = bytemuck::cast_slice(&half);
        let gate_up = Arc::new(Packed::gated(&mut arena, &[half, half], HIDDEN, precision)?);
        for &isa in isas {
            cases.extend([1, 8, 32].map(|m| product("head", isa, m, &head, true)));
            for (what, w) in [("qkv", &qkv), ("gate_up+silu", &gate_up), ("down", &down)] {
                cases.push(product(what, isa, 384, w, false));
            }
        }
    }
    Ok(cases)
}

fn product(what: &str, isa: Isa, m: usize, w: &Arc<Packed>, from_memory: bool) -> Case {
    let name = format!("product {what} {} {m}x{}x{}", name(w.precision()), w.n(), w.k());
    let work = match from_memory {
        true => Work::Bytes(w.bytes() as f64),
        false => Work::Operations(2.0 * (m * w.n() * w.k()) as f64, isa, w.precision()),
    };
    let (w, x) = (w.clone(), Operand::new(m * w.k(), isa));
    let run: Box<dyn FnMut()> = if w.is_gated() {
        let mut out = vec![bf16::ZERO; m * w.n() / 2];
        Box::new(move || matmul::silu_mul(isa, x.input(), &w, Output::Bf16(&mut out)))
    } else {
        let mut y = vec![0f32; m * w.n()];
        Box::new(move || matmul::matmul(isa, x.input(), &w, None, &mut y, false))
    };
    Case { name, isa, work, run }
}

/// Activations in the form that a model would hand over.
struct Operand {
    wide: Vec<f32>,
    narrow: Vec<bf16>,
    /// Where a cache line starts, as in a model's workspace.
    start: usize,
    len: usize,
    isa: Isa,
}

impl Operand {
    fn new(len: usize, isa: Isa) -> Self {
        const LINE: usize = 64 / size_of::<bf16>();
        let mut narrow = values(len + LINE);
        let start = narrow.as_ptr().align_offset(64);
        narrow.rotate_right(start);
        let wide = narrow[start..start + len].iter().map(|x| x.to_f32()).collect();
        Self { wide, narrow, start, len, isa }
    }

    fn input(&self) -> Input<'_> {
        match self.isa.computes_bf16() {
            true => Input::Bf16(&self.narrow[self.start..self.start + self.len]),
            false => Input::F32(&self.wide),
        }
    }
}

/// One layer of sequences of `(tokens before, new tokens)`.
fn attention(isa: Isa, seqs: &[(usize, usize)]) -> Case {
    let (mut meta, mut next) = (BatchMeta::default(), 0u32);
    for &(before, new) in seqs {
        let blocks = (before + new).div_ceil(LAYOUT.block_size) as u32;
        meta.push(&(next..next + blocks).collect::<Vec<u32>>(), before, new, LAYOUT.block_size);
        next += blocks;
    }
    let pool = KvPool::new(LAYOUT, next as usize).expect("a small pool");
    // SAFETY: the pool is this function's, and nobody else has its address.
    let all = unsafe { std::slice::from_raw_parts_mut(pool.base().as_ptr().cast::<bf16>(), pool.len() / 2) };
    all.copy_from_slice(&values(all.len()));
    let (before, new) = seqs[0];
    let (name, work) = match new {
        1 => {
            let bytes = seqs.len() * (before + 1) * LAYOUT.token_bytes();
            (format!("attention, {} decoding at {}", seqs.len(), before + 1), Work::Bytes(bytes as f64))
        }
        _ => {
            let seen = new * (new + 1) / 2;
            let operations = 4.0 * (seen * HEADS * LAYOUT.head_dim) as f64;
            (format!("attention, prompt of {new}"), Work::Operations(operations, isa, Precision::Bf16))
        }
    };
    let len = meta.num_tokens() * HEADS * LAYOUT.head_dim;
    let (q, mut wide, mut narrow) = (Operand::new(len, isa), vec![0f32; len], vec![bf16::ZERO; len]);
    let run = move || {
        let layer = Attention { pool: &pool, layer: 0, meta: &meta, heads: HEADS };
        let out = if isa.computes_bf16() { Output::Bf16(&mut narrow) } else { Output::F32(&mut wide) };
        // SAFETY: the pool is this closure's.
        unsafe { layer.run(isa, q.input(), out) };
    };
    Case { name, isa, work, run: Box::new(run) }
}

/// What works on rows, on the 384 of a chunk; everything stays in a cache.
fn pointwise_cases(isa: Isa) -> Vec<Case> {
    const ROWS: usize = 384;
    let x: Vec<f32> = values(ROWS * HIDDEN).iter().map(|x| x.to_f32()).collect();
    let mut out = vec![bf16::ZERO; ROWS * HIDDEN];
    let norm = move || pointwise::rms_norm(&x, &[1.0; HIDDEN], 1e-6, Output::Bf16(&mut out));
    let mut meta = BatchMeta::default();
    let table: Vec<u32> = (0..(ROWS / LAYOUT.block_size) as u32).collect();
    meta.push(&table, 0, ROWS, LAYOUT.block_size);
    let pool = KvPool::new(LAYOUT, table.len()).expect("a small pool");
    let joined: Vec<f32> = values(ROWS * 4 * HIDDEN).iter().map(|x| x.to_f32()).collect();
    let mut q = vec![bf16::ZERO; ROWS * 2 * HIDDEN];
    let turns = vec![0.5f32; ROWS * LAYOUT.head_dim / 2];
    let split = move || {
        let one = [1.0; LAYOUT.head_dim];
        let (norms, cos, sin) = (Some((&one[..], &one[..])), &turns[..], &turns[..]);
        let qkv = qkv::Qkv { pool: &pool, layer: 0, meta: &meta, heads: HEADS, norms, eps: 1e-6, cos, sin };
        // SAFETY: the pool is this closure's.
        unsafe { qkv.run(0, &joined, Output::Bf16(&mut q)) };
    };
    // Elements read as f32 and written as bf16.
    let bytes = |width: usize| Work::Bytes((ROWS * width * 6) as f64);
    vec![
        Case { name: format!("rms_norm {ROWS}x{HIDDEN}"), isa, work: bytes(HIDDEN), run: Box::new(norm) },
        Case {
            name: format!("qk_norm+rope+kv_write {ROWS}x{}", 4 * HIDDEN),
            isa,
            work: bytes(4 * HIDDEN),
            run: Box::new(split),
        },
    ]
}

fn values(len: usize) -> Vec<bf16> {
    (0..len).map(|i| bf16::from_f32((i * 7919 % 2003) as f32 / 1001.0 - 1.0)).collect()
}
