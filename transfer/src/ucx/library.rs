//! Finding and loading `libucp`: the one that NIXL's wheel carries, else the system's.

use std::ffi::CStr;
use std::path::{Path, PathBuf};

use super::sys::{UcpApi, ucs_status_t};
use crate::error::TransferError;
use crate::nixl::{HOW_TO_GET, search_path as nixl_search_path};

const FILE: &str = "libucp.so.0";

/// Where NIXL's wheels keep UCX, beside NIXL's own folder.
const FOLDERS: [&str; 2] = ["nixl_cu13.libs", "nixl_cu12.libs"];

/// The oldest UCP 1.x that these bindings were tried with.
const OLDEST: u32 = 20;

/// The loaded API. It stays loaded until the process ends: UCX keeps threads and exit handlers.
#[derive(Clone, Copy)]
pub struct Library {
    api: &'static UcpApi,
}

impl Library {
    /// Loads the first library on the search path.
    ///
    /// Errors: nothing found (names every place), found but not loadable, or too old.
    pub fn load(transport: &str, configured: Option<&Path>) -> Result<(Self, String), TransferError> {
        let candidates = search_path(configured);
        let unusable = |why| TransferError::Unavailable { name: transport.to_owned(), why };
        for path in &candidates {
            let by_loader = path.as_os_str() == FILE;
            // SAFETY: loading runs UCX's initialisers, which have no precondition but an environment that is not being
            // changed; `environment::apply` has returned by now.
            match unsafe { UcpApi::new(path) } {
                Ok(api) => {
                    let shown = path.display().to_string();
                    require(&api).map_err(|why| unusable(format!("{shown}: {why}; {HOW_TO_GET}")))?;
                    return Ok((Self { api: Box::leak(Box::new(api)) }, shown));
                }
                Err(error) if !by_loader => {
                    let path = path.display();
                    return Err(unusable(format!("{path} does not load: {error}; {HOW_TO_GET}")));
                }
                Err(_) => {}
            }
        }
        Err(TransferError::LibraryMissing {
            transport: transport.to_owned(),
            library: FILE.to_owned(),
            searched: candidates.iter().map(|path| path.display().to_string()).collect(),
            how_to_get: HOW_TO_GET.to_owned(),
        })
    }

    /// The functions. Calling one that [`require`] did not name would panic.
    pub fn api(self) -> &'static UcpApi {
        self.api
    }

    /// A call's status as an error that names it.
    pub fn check(self, call: &'static str, status: ucs_status_t) -> Result<(), TransferError> {
        if status == 0 {
            return Ok(());
        }
        Err(TransferError::Library { call, status: format!("{} (UCX)", self.describe(status)) })
    }

    /// UCX's words for a status.
    pub fn describe(self, status: ucs_status_t) -> String {
        // SAFETY: the symbol is there (`require`), takes any number, and returns a static string.
        let text = unsafe { CStr::from_ptr(self.api.ucs_status_string(status)) };
        format!("{} ({status})", text.to_string_lossy())
    }
}

/// The files tried, in order: beside each place where NIXL would be looked for, those that are there; then the system's
/// loader.
pub fn search_path(configured: Option<&Path>) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for nixl in nixl_search_path(configured) {
        let Some(root) = nixl.parent() else { continue };
        let roots = [Some(root), root.parent()];
        for folder in roots.into_iter().flatten().flat_map(|root| FOLDERS.map(|folder| root.join(folder))) {
            let found = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
            let is_ucp = |path: &PathBuf| {
                let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                name.starts_with("libucp-") || name == FILE
            };
            for path in found.map(|entry| entry.path()).filter(is_ucp) {
                if !files.contains(&path) {
                    files.push(path);
                }
            }
        }
    }
    files.push(PathBuf::from(FILE));
    files
}

/// Every function that we call must be there, of an interface that is new enough.
fn require(api: &UcpApi) -> Result<(), String> {
    macro_rules! missing {
        ($($symbol:ident)*) => {
            [$((stringify!($symbol), api.$symbol.is_err())),*]
        };
    }
    let symbols = missing! {
        ucs_status_string ucp_get_version ucp_init_version ucp_cleanup
        ucp_worker_create ucp_worker_destroy ucp_worker_progress ucp_worker_get_address ucp_worker_release_address
        ucp_worker_set_am_recv_handler ucp_ep_create ucp_ep_close_nbx ucp_ep_flush_nbx
        ucp_mem_map ucp_mem_unmap ucp_rkey_pack ucp_rkey_buffer_release ucp_ep_rkey_unpack ucp_rkey_destroy
        ucp_put_nbx ucp_get_nbx ucp_am_send_nbx ucp_request_check_status ucp_request_free
    };
    if let Some((symbol, _)) = symbols.iter().find(|(_, missing)| *missing) {
        return Err(format!("it lacks {symbol}"));
    }
    let (mut major, mut minor, mut release) = (0, 0, 0);
    // SAFETY: three out parameters.
    unsafe { api.ucp_get_version(&mut major, &mut minor, &mut release) };
    match (major, minor) {
        (1, OLDEST..) => Ok(()),
        _ => Err(format!("it is UCX {major}.{minor}.{release}, expected 1.{OLDEST} or newer")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_in_the_configured_folder_comes_first_and_the_loader_last() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("nixl_cu13.libs")).unwrap();
        let file = dir.path().join("nixl_cu13.libs/libucp-0123.so.0.0.0");
        std::fs::write(&file, "not a library").unwrap();
        let files = search_path(Some(dir.path()));
        assert_eq!(files[0], file);
        assert_eq!(files.last().unwrap(), Path::new(FILE));
        let error = Library::load("ucx:tcp", Some(dir.path())).err().unwrap().to_string();
        for part in ["ucx:tcp", file.to_str().unwrap(), "scripts/nixl-setup"] {
            assert!(error.contains(part), "{part:?} is missing in {error}");
        }
    }
}
