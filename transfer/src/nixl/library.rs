//! Finding and loading `libnixl_capi.so`.

use std::env;
use std::path::{Path, PathBuf};

use super::sys::NixlCapi;
use crate::error::TransferError;

/// What to do when the library is not there.
pub const HOW_TO_GET: &str = "run scripts/nixl-setup";

const FILE: &str = "libnixl_capi.so";

/// Where in an installation the library may lie: beside the folder's other files, or as in NIXL's wheels.
const FOLDERS: [&str; 3] = ["", ".nixl_cu13.mesonpy.libs", ".nixl_cu12.mesonpy.libs"];

/// The loaded C API. It stays loaded until the process ends: UCX keeps threads and exit handlers.
#[derive(Clone, Copy)]
pub struct Library {
    api: &'static NixlCapi,
}

impl Library {
    /// Loads the first library on the search path.
    ///
    /// Errors: nothing found (names every place), found but not loadable, not NIXL 1.5, or a stub.
    pub fn load(transport: &str, configured: Option<&Path>) -> Result<(Self, String), TransferError> {
        let candidates = search_path(configured);
        let unusable = |why| TransferError::Unavailable { name: transport.to_owned(), why };
        for path in &candidates {
            let by_loader = path.as_os_str() == FILE;
            if !by_loader && !path.is_file() {
                continue;
            }
            // SAFETY: loading runs the initialisers of NIXL and UCX, which have no precondition but an
            // environment that is not being changed; `environment::apply` has returned by now.
            match unsafe { NixlCapi::new(path) } {
                Ok(api) => {
                    return Ok((Self::checked(api, path).map_err(unusable)?, path.display().to_string()));
                }
                Err(error) if !by_loader => {
                    return Err(unusable(format!("{} does not load: {error}; {HOW_TO_GET}", path.display())));
                }
                Err(_) => {}
            }
        }
        Err(TransferError::LibraryMissing {
            transport: transport.to_owned(),
            library: FILE.to_owned(),
            searched: candidates.iter().map(|p| p.display().to_string()).collect(),
            how_to_get: HOW_TO_GET.to_owned(),
        })
    }

    /// The functions. Calling one that [`Library::checked`] did not name would panic.
    pub fn api(self) -> &'static NixlCapi {
        self.api
    }

    fn checked(api: NixlCapi, path: &Path) -> Result<Self, String> {
        require_symbols(&api, path)?;
        // SAFETY: the symbol is present (just checked), takes nothing and returns a bool.
        if unsafe { api.nixl_capi_is_stub() } {
            return Err(format!("{} is a stub without NIXL behind it; {HOW_TO_GET}", path.display()));
        }
        Ok(Self { api: Box::leak(Box::new(api)) })
    }
}

/// The files tried, in order: the configured directory, a `.nixl` folder above the executable or the working
/// directory, the user's data directory, the system's loader.
pub fn search_path(configured: Option<&Path>) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = configured.map(Path::to_owned).into_iter().collect();
    for start in [env::current_exe().ok(), env::current_dir().ok()].into_iter().flatten() {
        roots.extend(start.ancestors().map(|dir| dir.join(".nixl")).find(|dir| dir.is_dir()));
    }
    roots.extend(data_home().map(|dir| dir.join("kvferry/nixl")));

    let mut files = Vec::new();
    for file in roots.iter().flat_map(|root| FOLDERS.map(|folder| root.join(folder).join(FILE))) {
        if !files.contains(&file) {
            files.push(file);
        }
    }
    files.push(PathBuf::from(FILE));
    files
}

fn data_home() -> Option<PathBuf> {
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    absolute("XDG_DATA_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/share")))
}

/// Every function that `agent` calls must be there: a missing one would otherwise panic at its first call.
fn require_symbols(api: &NixlCapi, path: &Path) -> Result<(), String> {
    macro_rules! missing {
        ($($symbol:ident)*) => {
            [$((stringify!($symbol), api.$symbol.is_err())),*]
        };
    }
    let symbols = missing! {
        nixl_capi_is_stub
        nixl_capi_create_configured_agent nixl_capi_destroy_agent
        nixl_capi_get_plugin_params nixl_capi_destroy_mem_list nixl_capi_destroy_params
        nixl_capi_create_backend nixl_capi_destroy_backend
        nixl_capi_create_reg_dlist nixl_capi_destroy_reg_dlist nixl_capi_reg_dlist_add_desc
        nixl_capi_register_mem nixl_capi_deregister_mem
        nixl_capi_get_local_md nixl_capi_load_remote_md nixl_capi_invalidate_remote_md
        nixl_capi_create_opt_args nixl_capi_destroy_opt_args nixl_capi_opt_args_add_backend
        nixl_capi_opt_args_set_notif_msg nixl_capi_opt_args_set_has_notif
        nixl_capi_create_xfer_dlist nixl_capi_destroy_xfer_dlist nixl_capi_xfer_dlist_add_desc
        nixl_capi_prep_xfer_dlist nixl_capi_release_xfer_dlist_handle nixl_capi_make_xfer_req
        nixl_capi_create_xfer_req nixl_capi_post_xfer_req nixl_capi_get_xfer_status
        nixl_capi_release_xfer_req nixl_capi_destroy_xfer_req
        nixl_capi_create_notif_map nixl_capi_destroy_notif_map nixl_capi_get_notifs nixl_capi_notif_map_size
        nixl_capi_notif_map_get_agent_at nixl_capi_notif_map_get_notifs_size nixl_capi_notif_map_get_notif
        nixl_capi_notif_map_clear
    };
    match symbols.iter().find(|(_, missing)| *missing) {
        None => Ok(()),
        Some((symbol, _)) => Err(format!(
            "{} lacks {symbol}: not a NIXL C library of version 1.5; {HOW_TO_GET}",
            path.display()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configured_directory_comes_first_and_the_loader_last() {
        let files = search_path(Some(Path::new("/configured")));
        assert_eq!(files[0], Path::new("/configured/libnixl_capi.so"));
        assert_eq!(files[1], Path::new("/configured/.nixl_cu13.mesonpy.libs/libnixl_capi.so"));
        assert_eq!(files.last().unwrap(), Path::new("libnixl_capi.so"));
    }

    #[test]
    fn a_file_that_is_no_library_is_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), "not a library").unwrap();
        let error = Library::load("tcp", Some(dir.path())).err().unwrap().to_string();
        for part in ["tcp", dir.path().to_str().unwrap(), "scripts/nixl-setup"] {
            assert!(error.contains(part), "{part:?} is missing in {error}");
        }
    }
}
