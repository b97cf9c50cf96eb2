//! Products of many rows by cuBLASLt, which is opened when it is there.

use std::collections::HashMap;
use std::ffi::c_void;

use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::CUstream;

use super::backend::{Product, ProductOutput};
use super::error::CudaError;

type Result<T> = std::result::Result<T, CudaError>;

/// Scratch memory that algorithms may ask for: what cuBLAS itself takes on Hopper.
pub const WORKSPACE: usize = 32 << 20;

/// A handle and what was found out about each shape.
#[derive(Debug)]
pub struct Cublas {
    handle: sys::cublasLtHandle_t,
    plans: HashMap<Shape, Plan>,
    workspace: Option<u64>,
}

// SAFETY: the handle may be used on any thread; ours is behind a lock.
unsafe impl Send for Cublas {}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    output: ProductOutput,
}

/// Descriptors of one shape and the algorithm that cuBLASLt recommends for it.
#[derive(Debug)]
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// Plans kept: prompts come in any length, so shapes are without end.
const MAX_PLANS: usize = 512;

fn call<T>(what: &'static str, result: std::result::Result<T, result::CublasError>) -> Result<T> {
    result.map_err(|error| CudaError::Call { what, code: format!("{:?}", error.0) })
}

impl Cublas {
    /// `None` if the library is not there or does not start. A context must be current.
    pub fn open() -> Option<Self> {
        preload();
        // SAFETY: looks for the library and nothing else.
        if !unsafe { sys::is_culib_present() } {
            return None;
        }
        let handle = result::create_handle();
        let handle = handle.map_err(|error| tracing::warn!(%error, "cuBLASLt does not start")).ok()?;
        Some(Self { handle, plans: HashMap::new(), workspace: None })
    }

    /// Computes the product on `stream`.
    ///
    /// # Safety
    /// The addresses are valid for the sizes, and the context is current.
    pub unsafe fn multiply(
        &mut self,
        product: &Product,
        stream: CUstream,
        alloc: impl FnOnce() -> Result<u64>,
    ) -> Result<()> {
        let workspace = match self.workspace {
            Some(workspace) => workspace,
            None => *self.workspace.insert(alloc()?),
        };
        let shape = Shape { m: product.m, n: product.n, k: product.k, output: product.output };
        if self.plans.len() >= MAX_PLANS && !self.plans.contains_key(&shape) {
            self.plans.clear();
        }
        let plan = match self.plans.entry(shape) {
            std::collections::hash_map::Entry::Occupied(plan) => plan.into_mut(),
            std::collections::hash_map::Entry::Vacant(room) => room.insert(Plan::new(self.handle, shape)?),
        };
        let beta = if shape.output == ProductOutput::AddF32 { 1f32 } else { 0f32 };
        let (alpha, y) = (1f32, product.y as *mut c_void);
        // SAFETY: descriptors of this shape; the addresses are the caller's promise; the scalars are read before the
        // call returns.
        let done = unsafe {
            result::matmul(
                self.handle,
                plan.operation,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                product.w as *const c_void,
                plan.w,
                product.x as *const c_void,
                plan.x,
                y,
                plan.y,
                y,
                plan.y,
                &raw const plan.algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                stream.cast(),
            )
        };
        call("cublasLtMatmul", done)
    }
}

impl Plan {
    /// cuBLAS counts by columns, we by rows: what is `y = x · wᵀ` to us is `y' = (w')ᵀ · x'` to it.
    fn new(handle: sys::cublasLtHandle_t, shape: Shape) -> Result<Self> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_32F};
        let Shape { m, n, k, output } = shape;
        let stored = if output == ProductOutput::Bf16 { CUDA_R_16BF } else { CUDA_R_32F };
        let layout = |kind, rows: usize, columns: usize| {
            let layout = result::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64);
            call("cublasLtMatrixLayoutCreate", layout)
        };
        let operation = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, CUDA_R_32F);
        let mut plan = Self {
            operation: call("cublasLtMatmulDescCreate", operation)?,
            w: layout(CUDA_R_16BF, k, n)?,
            x: layout(CUDA_R_16BF, k, m)?,
            y: layout(stored, n, m)?,
            // SAFETY: plain data, filled below.
            algorithm: unsafe { std::mem::zeroed() },
        };
        // CUBLAS_OP_T, which these bindings leave out.
        let transposed = 1i32;
        // SAFETY: a descriptor of ours, and a value of the attribute's type.
        let set = unsafe {
            result::set_matmul_desc_attribute(
                plan.operation,
                Attribute::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )
        };
        call("cublasLtMatmulDescSetAttribute", set)?;
        plan.algorithm = plan.recommended(handle)?;
        Ok(plan)
    }

    fn recommended(&self, handle: sys::cublasLtHandle_t) -> Result<sys::cublasLtMatmulAlgo_t> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = call("cublasLtMatmulPreferenceCreate", result::create_matmul_pref())?;
        // SAFETY: descriptors of ours, and a value of the attribute's type.
        let found = unsafe {
            let set = result::set_matmul_pref_attribute(
                preference,
                Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const WORKSPACE_BYTES).cast(),
                size_of_val(&WORKSPACE_BYTES),
            );
            let found = set.and_then(|()| {
                let (operation, y) = (self.operation, self.y);
                result::get_matmul_algo_heuristic(handle, operation, self.w, self.x, y, y, preference)
            });
            let _ = result::destroy_matmul_pref(preference);
            found
        };
        call("cublasLtMatmulAlgoGetHeuristic", found).map(|found| found.algo)
    }
}

static WORKSPACE_BYTES: usize = WORKSPACE;

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: ours; a refusal changes nothing.
        unsafe {
            let _ = result::destroy_matrix_layout(self.w);
            let _ = result::destroy_matrix_layout(self.x);
            let _ = result::destroy_matrix_layout(self.y);
            let _ = result::destroy_matmul_desc(self.operation);
        }
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        self.plans.clear();
        // The workspace goes with the context.
        // SAFETY: ours.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Opens the library from where CUDA installs it: that folder is seldom on the loader's path, and once it is open the
/// loader finds it by its name.
fn preload() {
    let folders = ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/opt/cuda/lib64"];
    for folder in folders {
        for version in ["13", "12"] {
            // SAFETY: NVIDIA's library; its initialisers do nothing that we rely on not being done.
            let opened = unsafe { libloading::Library::new(format!("{folder}/libcublasLt.so.{version}")) };
            if let Ok(library) = opened {
                // It stays open for the process's life.
                std::mem::forget(library);
                return;
            }
        }
    }
}
