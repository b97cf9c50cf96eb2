//! The tiles of AMX: 16 x 16 sums of products, 32 bf16 (or 64 byte) inputs at a time (Intel's Software Developer's Manual,
//! volume 1, chapter 18).
//!
//! Rust has no stable intrinsics for them, so the instructions are written out. The compiler never uses tile registers, so
//! they need not be named as clobbered.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::marker::PhantomData;
use std::sync::OnceLock;

use super::packed::{COLUMNS, Precision};

/// Rows of a tile.
pub const ROWS: usize = 16;
/// Bytes of a tile's row.
const ROW_BYTES: usize = 64;
/// Words (pairs of bf16, or four bytes) of a tile's row: what one step sums over.
pub const STEP: usize = ROW_BYTES / size_of::<u32>();
/// Bytes from one word of a panel to the next.
const PANEL_ROW: usize = COLUMNS * size_of::<u32>();
/// Bytes of a panel that one step reads.
const PANEL_STEP: usize = STEP * PANEL_ROW;
/// How far ahead of its use a panel in memory is asked for: two steps.
const AHEAD: usize = 2 * PANEL_STEP;

/// True if the CPU has the tiles, with bf16 and byte products, and the kernel lets this process use them.
pub fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        // Leaf 7: AMX-BF16, AMX-TILE and AMX-INT8 are bits 22, 24 and 25 of edx.
        let needed = 1 << 22 | 1 << 24 | 1 << 25;
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & needed == needed && ask_for_tiles()
    })
}

/// Linux gives out the 8 KiB of tile state of each thread on demand: `ARCH_REQ_XCOMP_PERM` for `XTILEDATA`.
#[cfg(target_os = "linux")]
fn ask_for_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const XTILEDATA: libc::c_ulong = 18;
    // SAFETY: asks for a permission; touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn ask_for_tiles() -> bool {
    false
}

/// Operands: `c[i, j] (+)= sum over p of a[i, p] . b[p, j]` for a panel's [`COLUMNS`] columns.
#[derive(Clone, Copy)]
pub struct Tile {
    /// bf16 pairs summed in f32, or unsigned bytes times signed ones summed in i32.
    pub precision: Precision,
    /// Steps of [`STEP`] words to sum over, at least one.
    pub steps: usize,
    /// Rows of `steps * STEP` words, `a_row` words apart; at multiples of 64 bytes for speed.
    pub a: *const u32,
    pub a_row: usize,
    pub b: *const u32,
    /// [`COLUMNS`] sums (f32 or i32) for each row, `c_row` apart.
    pub c: *mut u32,
    pub c_row: usize,
    /// Start from what `c` holds.
    pub add: bool,
    /// `b` comes from memory and is used once.
    pub stream: bool,
}

/// The tiles of this thread, configured; released at the end, so that others need not save them.
pub struct Session {
    rows: usize,
    /// Tiles belong to a thread.
    _thread: PhantomData<*const ()>,
}

impl Session {
    /// # Safety
    /// [`is_available`], and this thread has no other session.
    pub unsafe fn new() -> Self {
        let mut session = Self { rows: 0, _thread: PhantomData };
        session.configure(ROWS);
        session
    }

    /// Tiles 0 to 4 (sums and activations) get `rows` rows, 5 to 7 (weights) sixteen; all are zeroed. Needs 4 and 5 of equal
    /// size only for sixteen rows.
    fn configure(&mut self, rows: usize) {
        #[repr(C, align(64))]
        struct Config([u8; 64]);
        if self.rows == rows {
            return;
        }
        let mut config = Config([0; 64]);
        config.0[0] = 1;
        for tile in 0..8 {
            config.0[16 + 2 * tile] = ROW_BYTES as u8;
            config.0[48 + tile] = if tile < 5 { rows as u8 } else { ROWS as u8 };
        }
        // SAFETY: the CPU has tiles (see `new`), and palette 1 has eight of 16 rows by 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
        self.rows = rows;
    }

    /// Computes `rows` rows. For each element the words are summed in order, whatever `rows` is.
    ///
    /// # Safety
    /// All of `a`, `b` and `c` that the fields name may be accessed.
    pub unsafe fn run(&mut self, rows: usize, tile: &Tile) {
        let mut done = 0;
        while done < rows {
            let left = rows - done;
            // SAFETY: these rows are below `rows`.
            let part = unsafe {
                Tile { a: tile.a.add(done * tile.a_row), c: tile.c.add(done * tile.c_row), ..*tile }
            };
            self.configure(left.min(ROWS));
            // SAFETY: passed on from the caller; the precision says which instruction the words are for.
            unsafe {
                match (left >= 2 * ROWS, tile.precision) {
                    (true, Precision::Bf16) => (0..2).for_each(|half| square_bf16(&part, half)),
                    (true, Precision::Int8) => (0..2).for_each(|half| square_int8(&part, half)),
                    (false, Precision::Bf16) => strip_bf16(&part),
                    (false, Precision::Int8) => strip_int8(&part),
                }
            }
            done += if left >= 2 * ROWS { 2 * ROWS } else { left.min(ROWS) };
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: the session configured the tiles, and nobody uses them after it.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// `$square`: 32 rows by the first or second 32 columns, four tiles of sums. `$strip`: up to 16 rows by all 64 columns, each
/// byte of the panel read once. `$dot` multiplies and adds.
macro_rules! kernels {
    ($square:ident, $strip:ident, $dot:literal) => {
        /// # Safety
        /// As [`Session::run`], for 32 rows; the session is configured for [`ROWS`].
        unsafe fn $square(t: &Tile, half: usize) {
            let (a_row, c_row) = (t.a_row * size_of::<u32>(), t.c_row * size_of::<u32>());
            let (b, c) = (t.b.wrapping_add(half * COLUMNS / 2), t.c.wrapping_add(half * COLUMNS / 2));
            // SAFETY: passed on from the caller; tiles are 16 rows of 64 bytes.
            unsafe {
                asm!(
                    "test {add}, {add}",
                    "jz 2f",
                    "tileloadd tmm0, [{c} + {c_row}]",
                    "tileloadd tmm1, [{c} + {c_row} + 64]",
                    "tileloadd tmm2, [{d} + {c_row}]",
                    "tileloadd tmm3, [{d} + {c_row} + 64]",
                    "jmp 3f",
                    "2:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "3:",
                    "tileloadd tmm4, [{a} + {a_row}]",
                    "tileloadd tmm6, [{b} + {b_row}]",
                    concat!($dot, " tmm0, tmm4, tmm6"),
                    "tileloadd tmm7, [{b} + {b_row} + 64]",
                    concat!($dot, " tmm1, tmm4, tmm7"),
                    "tileloadd tmm5, [{e} + {a_row}]",
                    concat!($dot, " tmm2, tmm5, tmm6"),
                    concat!($dot, " tmm3, tmm5, tmm7"),
                    "add {a}, 64",
                    "add {e}, 64",
                    "add {b}, {b_step}",
                    "dec {steps}",
                    "jnz 3b",
                    "tilestored [{c} + {c_row}], tmm0",
                    "tilestored [{c} + {c_row} + 64], tmm1",
                    "tilestored [{d} + {c_row}], tmm2",
                    "tilestored [{d} + {c_row} + 64], tmm3",
                    a = inout(reg) t.a => _,
                    e = inout(reg) t.a.add(ROWS * t.a_row) => _,
                    a_row = in(reg) a_row,
                    b = inout(reg) b => _,
                    b_row = in(reg) PANEL_ROW,
                    b_step = const PANEL_STEP,
                    c = in(reg) c,
                    d = in(reg) c.add(ROWS * t.c_row),
                    c_row = in(reg) c_row,
                    steps = inout(reg) t.steps => _,
                    add = in(reg) usize::from(t.add),
                    options(nostack),
                );
            }
        }

        /// # Safety
        /// As [`Session::run`], for as many rows as the session is configured for.
        unsafe fn $strip(t: &Tile) {
            let (a_row, c_row) = (t.a_row * size_of::<u32>(), t.c_row * size_of::<u32>());
            // SAFETY: passed on from the caller; tiles 0 to 4 have the rows of the session, the others sixteen. A
            // prefetch beyond the end is no access.
            unsafe {
                asm!(
                    "test {add}, {add}",
                    "jz 2f",
                    "tileloadd tmm0, [{c} + {c_row}]",
                    "tileloadd tmm1, [{c} + {c_row} + 64]",
                    "tileloadd tmm2, [{c} + {c_row} + 128]",
                    "tileloadd tmm3, [{c} + {c_row} + 192]",
                    "jmp 3f",
                    "2:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "3:",
                    "tileloadd tmm4, [{a} + {a_row}]",
                    "tileloadd tmm5, [{b} + {b_row}]",
                    concat!($dot, " tmm0, tmm4, tmm5"),
                    "tileloadd tmm6, [{b} + {b_row} + 64]",
                    concat!($dot, " tmm1, tmm4, tmm6"),
                    "tileloadd tmm7, [{b} + {b_row} + 128]",
                    concat!($dot, " tmm2, tmm4, tmm7"),
                    "tileloadd tmm5, [{b} + {b_row} + 192]",
                    concat!($dot, " tmm3, tmm4, tmm5"),
                    "add {a}, 64",
                    "add {b}, {b_step}",
                    // Asks for each line of a later step.
                    "test {stream}, {stream}",
                    "jz 5f",
                    "lea {next}, [{b} + {ahead}]",
                    "lea {end}, [{next} + {b_step}]",
                    "4:",
                    "prefetcht1 [{next}]",
                    "prefetcht1 [{next} + 64]",
                    "prefetcht1 [{next} + 128]",
                    "prefetcht1 [{next} + 192]",
                    "prefetcht1 [{next} + 256]",
                    "prefetcht1 [{next} + 320]",
                    "prefetcht1 [{next} + 384]",
                    "prefetcht1 [{next} + 448]",
                    "add {next}, 512",
                    "cmp {next}, {end}",
                    "jb 4b",
                    "5:",
                    "dec {steps}",
                    "jnz 3b",
                    "tilestored [{c} + {c_row}], tmm0",
                    "tilestored [{c} + {c_row} + 64], tmm1",
                    "tilestored [{c} + {c_row} + 128], tmm2",
                    "tilestored [{c} + {c_row} + 192], tmm3",
                    a = inout(reg) t.a => _,
                    a_row = in(reg) a_row,
                    b = inout(reg) t.b => _,
                    b_row = in(reg) PANEL_ROW,
                    b_step = const PANEL_STEP,
                    ahead = const AHEAD,
                    next = out(reg) _,
                    end = out(reg) _,
                    c = in(reg) t.c,
                    c_row = in(reg) c_row,
                    steps = inout(reg) t.steps => _,
                    add = in(reg) usize::from(t.add),
                    stream = in(reg) usize::from(t.stream),
                    options(nostack),
                );
            }
        }
    };
}

kernels!(square_bf16, strip_bf16, "tdpbf16ps");
kernels!(square_int8, strip_int8, "tdpbusd");

/// Multiplies tiles that stay in registers, `steps` times; returns the operations of a step.
///
/// # Safety
/// As [`Session::new`].
pub unsafe fn registers(steps: usize, precision: Precision) -> usize {
    // SAFETY: passed on from the caller.
    let _session = unsafe { Session::new() };
    for _ in 0..steps {
        // SAFETY: the session configured all eight tiles; nothing else is touched.
        unsafe {
            match precision {
                Precision::Bf16 => asm!(
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    options(nostack, nomem)
                ),
                Precision::Int8 => asm!(
                    "tdpbusd tmm0, tmm4, tmm6",
                    "tdpbusd tmm1, tmm4, tmm7",
                    "tdpbusd tmm2, tmm5, tmm6",
                    "tdpbusd tmm3, tmm5, tmm7",
                    options(nostack, nomem)
                ),
            }
        }
    }
    4 * 2 * ROWS * ROWS * STEP * precision.inputs()
}
