// Generated from transfer/nixl/nixl_capi.h by scripts/check-bindings --write. Do not edit.
impl nixl_capi_status_t {
    pub const NIXL_CAPI_SUCCESS: nixl_capi_status_t = nixl_capi_status_t(0);
    pub const NIXL_CAPI_IN_PROG: nixl_capi_status_t = nixl_capi_status_t(1);
    pub const NIXL_CAPI_ERROR_INVALID_PARAM: nixl_capi_status_t = nixl_capi_status_t(-1);
    pub const NIXL_CAPI_ERROR_BACKEND: nixl_capi_status_t = nixl_capi_status_t(-2);
    pub const NIXL_CAPI_ERROR_INVALID_STATE: nixl_capi_status_t = nixl_capi_status_t(-3);
    pub const NIXL_CAPI_ERROR_EXCEPTION: nixl_capi_status_t = nixl_capi_status_t(-4);
    pub const NIXL_CAPI_ERROR_NO_TELEMETRY: nixl_capi_status_t = nixl_capi_status_t(-5);
    pub const NIXL_CAPI_ERROR_NOT_FOUND: nixl_capi_status_t = nixl_capi_status_t(-6);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct nixl_capi_status_t(pub ::std::os::raw::c_int);
impl nixl_capi_mem_type_t {
    pub const NIXL_CAPI_MEM_DRAM: nixl_capi_mem_type_t = nixl_capi_mem_type_t(0);
    pub const NIXL_CAPI_MEM_VRAM: nixl_capi_mem_type_t = nixl_capi_mem_type_t(1);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct nixl_capi_mem_type_t(pub ::std::os::raw::c_uint);
impl nixl_capi_xfer_op_t {
    pub const NIXL_CAPI_XFER_OP_READ: nixl_capi_xfer_op_t = nixl_capi_xfer_op_t(0);
    pub const NIXL_CAPI_XFER_OP_WRITE: nixl_capi_xfer_op_t = nixl_capi_xfer_op_t(1);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct nixl_capi_xfer_op_t(pub ::std::os::raw::c_uint);
impl nixl_capi_thread_sync_t {
    pub const NIXL_CAPI_THREAD_SYNC_NONE: nixl_capi_thread_sync_t = nixl_capi_thread_sync_t(0);
    pub const NIXL_CAPI_THREAD_SYNC_STRICT: nixl_capi_thread_sync_t = nixl_capi_thread_sync_t(1);
    pub const NIXL_CAPI_THREAD_SYNC_RW: nixl_capi_thread_sync_t = nixl_capi_thread_sync_t(2);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct nixl_capi_thread_sync_t(pub ::std::os::raw::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nixl_capi_agent_s {
    _unused: [u8; 0],
}
pub type nixl_capi_agent_t = *mut nixl_capi_agent_s;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nixl_capi_params_s {
    _unused: [u8; 0],
}
pub type nixl_capi_params_t = *mut nixl_capi_params_s;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nixl_capi_mem_list_s {
    _unused: [u8; 0],
}
pub type nixl_capi_mem_list_t = *mut nixl_capi_mem_list_s;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nixl_capi_backend_s {
    _unused: [u8; 0],
}
pub type nixl_capi_backend_t = *mut nixl_capi_backend_s;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nixl_capi_opt_args_s {
    _unused: [u8; 0],
}
pub type nixl_capi_opt_args_t = *mut nixl_capi_opt_args_s;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nixl_capi_xfer_dlist_s {
    _unused: [u8; 0],
}
pub type nixl_capi_xfer_dlist_t = *mut nixl_capi_xfer_dlist_s;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nixl_capi_xfer_dlist_handle_s {
    _unused: [u8; 0],
}
pub type nixl_capi_xfer_dlist_handle_t = *mut nixl_capi_xfer_dlist_handle_s;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nixl_capi_reg_dlist_s {
    _unused: [u8; 0],
}
pub type nixl_capi_reg_dlist_t = *mut nixl_capi_reg_dlist_s;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nixl_capi_xfer_req_s {
    _unused: [u8; 0],
}
pub type nixl_capi_xfer_req_t = *mut nixl_capi_xfer_req_s;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nixl_capi_notif_map_s {
    _unused: [u8; 0],
}
pub type nixl_capi_notif_map_t = *mut nixl_capi_notif_map_s;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct nixl_capi_agent_config_s {
    pub enable_prog_thread: bool,
    pub enable_listen_thread: bool,
    pub listen_port: ::std::os::raw::c_int,
    pub thread_sync: nixl_capi_thread_sync_t,
    pub num_workers: ::std::os::raw::c_uint,
    pub pthr_delay_us: u64,
    pub lthr_delay_us: u64,
    pub capture_telemetry: bool,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of nixl_capi_agent_config_s"][::std::mem::size_of::<nixl_capi_agent_config_s>() - 40usize];
    ["Alignment of nixl_capi_agent_config_s"][::std::mem::align_of::<nixl_capi_agent_config_s>() - 8usize];
    ["Offset of field: nixl_capi_agent_config_s::enable_prog_thread"]
        [::std::mem::offset_of!(nixl_capi_agent_config_s, enable_prog_thread) - 0usize];
    ["Offset of field: nixl_capi_agent_config_s::enable_listen_thread"]
        [::std::mem::offset_of!(nixl_capi_agent_config_s, enable_listen_thread) - 1usize];
    ["Offset of field: nixl_capi_agent_config_s::listen_port"]
        [::std::mem::offset_of!(nixl_capi_agent_config_s, listen_port) - 4usize];
    ["Offset of field: nixl_capi_agent_config_s::thread_sync"]
        [::std::mem::offset_of!(nixl_capi_agent_config_s, thread_sync) - 8usize];
    ["Offset of field: nixl_capi_agent_config_s::num_workers"]
        [::std::mem::offset_of!(nixl_capi_agent_config_s, num_workers) - 12usize];
    ["Offset of field: nixl_capi_agent_config_s::pthr_delay_us"]
        [::std::mem::offset_of!(nixl_capi_agent_config_s, pthr_delay_us) - 16usize];
    ["Offset of field: nixl_capi_agent_config_s::lthr_delay_us"]
        [::std::mem::offset_of!(nixl_capi_agent_config_s, lthr_delay_us) - 24usize];
    ["Offset of field: nixl_capi_agent_config_s::capture_telemetry"]
        [::std::mem::offset_of!(nixl_capi_agent_config_s, capture_telemetry) - 32usize];
};
pub type nixl_capi_agent_config_t = nixl_capi_agent_config_s;
pub struct NixlCapi {
    __library: ::libloading::Library,
    pub nixl_capi_is_stub: Result<unsafe extern "C" fn() -> bool, ::libloading::Error>,
    pub nixl_capi_create_configured_agent: Result<
        unsafe extern "C" fn(
            name: *const ::std::os::raw::c_char,
            cfg: *const nixl_capi_agent_config_t,
            agent: *mut nixl_capi_agent_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_agent:
        Result<unsafe extern "C" fn(agent: nixl_capi_agent_t) -> nixl_capi_status_t, ::libloading::Error>,
    pub nixl_capi_get_plugin_params: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            plugin_name: *const ::std::os::raw::c_char,
            mems: *mut nixl_capi_mem_list_t,
            params: *mut nixl_capi_params_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_mem_list:
        Result<unsafe extern "C" fn(list: nixl_capi_mem_list_t) -> nixl_capi_status_t, ::libloading::Error>,
    pub nixl_capi_destroy_params:
        Result<unsafe extern "C" fn(params: nixl_capi_params_t) -> nixl_capi_status_t, ::libloading::Error>,
    pub nixl_capi_create_backend: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            plugin_name: *const ::std::os::raw::c_char,
            params: nixl_capi_params_t,
            backend: *mut nixl_capi_backend_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_backend:
        Result<unsafe extern "C" fn(backend: nixl_capi_backend_t) -> nixl_capi_status_t, ::libloading::Error>,
    pub nixl_capi_create_reg_dlist: Result<
        unsafe extern "C" fn(
            mem_type: nixl_capi_mem_type_t,
            dlist: *mut nixl_capi_reg_dlist_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_reg_dlist:
        Result<unsafe extern "C" fn(dlist: nixl_capi_reg_dlist_t) -> nixl_capi_status_t, ::libloading::Error>,
    pub nixl_capi_reg_dlist_add_desc: Result<
        unsafe extern "C" fn(
            dlist: nixl_capi_reg_dlist_t,
            addr: usize,
            len: usize,
            dev_id: u64,
            metadata: *const ::std::os::raw::c_void,
            metadata_len: usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_register_mem: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            dlist: nixl_capi_reg_dlist_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_deregister_mem: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            dlist: nixl_capi_reg_dlist_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_get_local_md: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            data: *mut *mut ::std::os::raw::c_void,
            len: *mut usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_load_remote_md: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            data: *const ::std::os::raw::c_void,
            len: usize,
            agent_name: *mut *mut ::std::os::raw::c_char,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_invalidate_remote_md: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            remote_agent: *const ::std::os::raw::c_char,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_opt_args: Result<
        unsafe extern "C" fn(args: *mut nixl_capi_opt_args_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_opt_args:
        Result<unsafe extern "C" fn(args: nixl_capi_opt_args_t) -> nixl_capi_status_t, ::libloading::Error>,
    pub nixl_capi_opt_args_add_backend: Result<
        unsafe extern "C" fn(args: nixl_capi_opt_args_t, backend: nixl_capi_backend_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_opt_args_set_notif_msg: Result<
        unsafe extern "C" fn(
            args: nixl_capi_opt_args_t,
            data: *const ::std::os::raw::c_void,
            len: usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_opt_args_set_has_notif: Result<
        unsafe extern "C" fn(args: nixl_capi_opt_args_t, has_notif: bool) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_xfer_dlist: Result<
        unsafe extern "C" fn(
            mem_type: nixl_capi_mem_type_t,
            dlist: *mut nixl_capi_xfer_dlist_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_xfer_dlist: Result<
        unsafe extern "C" fn(dlist: nixl_capi_xfer_dlist_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_xfer_dlist_add_desc: Result<
        unsafe extern "C" fn(
            dlist: nixl_capi_xfer_dlist_t,
            addr: usize,
            len: usize,
            dev_id: u64,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_xfer_req: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            operation: nixl_capi_xfer_op_t,
            local_descs: nixl_capi_xfer_dlist_t,
            remote_descs: nixl_capi_xfer_dlist_t,
            remote_agent: *const ::std::os::raw::c_char,
            req_hndl: *mut nixl_capi_xfer_req_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_post_xfer_req: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            req_hndl: nixl_capi_xfer_req_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_get_xfer_status: Result<
        unsafe extern "C" fn(agent: nixl_capi_agent_t, req_hndl: nixl_capi_xfer_req_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_release_xfer_req: Result<
        unsafe extern "C" fn(agent: nixl_capi_agent_t, req: nixl_capi_xfer_req_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_xfer_req:
        Result<unsafe extern "C" fn(req: nixl_capi_xfer_req_t) -> nixl_capi_status_t, ::libloading::Error>,
    pub nixl_capi_prep_xfer_dlist: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            agent_name: *const ::std::os::raw::c_char,
            descs: nixl_capi_xfer_dlist_t,
            dlist_hndl: *mut nixl_capi_xfer_dlist_handle_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_release_xfer_dlist_handle: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            dlist_handle: nixl_capi_xfer_dlist_handle_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_make_xfer_req: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            operation: nixl_capi_xfer_op_t,
            local_descs: nixl_capi_xfer_dlist_handle_t,
            local_indices: *const ::std::os::raw::c_int,
            local_indices_count: usize,
            remote_descs: nixl_capi_xfer_dlist_handle_t,
            remote_indices: *const ::std::os::raw::c_int,
            remote_indices_count: usize,
            req_hndl: *mut nixl_capi_xfer_req_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_create_notif_map: Result<
        unsafe extern "C" fn(notif_map: *mut nixl_capi_notif_map_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_destroy_notif_map: Result<
        unsafe extern "C" fn(notif_map: nixl_capi_notif_map_t) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_get_notifs: Result<
        unsafe extern "C" fn(
            agent: nixl_capi_agent_t,
            notif_map: nixl_capi_notif_map_t,
            opt_args: nixl_capi_opt_args_t,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_notif_map_size: Result<
        unsafe extern "C" fn(map: nixl_capi_notif_map_t, size: *mut usize) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_notif_map_get_agent_at: Result<
        unsafe extern "C" fn(
            map: nixl_capi_notif_map_t,
            index: usize,
            agent_name: *mut *const ::std::os::raw::c_char,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_notif_map_get_notifs_size: Result<
        unsafe extern "C" fn(
            map: nixl_capi_notif_map_t,
            agent_name: *const ::std::os::raw::c_char,
            size: *mut usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_notif_map_get_notif: Result<
        unsafe extern "C" fn(
            map: nixl_capi_notif_map_t,
            agent_name: *const ::std::os::raw::c_char,
            index: usize,
            data: *mut *const ::std::os::raw::c_void,
            len: *mut usize,
        ) -> nixl_capi_status_t,
        ::libloading::Error,
    >,
    pub nixl_capi_notif_map_clear:
        Result<unsafe extern "C" fn(map: nixl_capi_notif_map_t) -> nixl_capi_status_t, ::libloading::Error>,
}
impl NixlCapi {
    pub unsafe fn new<P>(path: P) -> Result<Self, ::libloading::Error>
    where
        P: AsRef<::std::ffi::OsStr>,
    {
        let library = unsafe { ::libloading::Library::new(path) }?;
        unsafe { Self::from_library(library) }
    }
    pub unsafe fn from_library<L>(library: L) -> Result<Self, ::libloading::Error>
    where
        L: Into<::libloading::Library>,
    {
        let __library = library.into();
        let nixl_capi_is_stub = unsafe { __library.get(b"nixl_capi_is_stub\0") }.map(|sym| *sym);
        let nixl_capi_create_configured_agent =
            unsafe { __library.get(b"nixl_capi_create_configured_agent\0") }.map(|sym| *sym);
        let nixl_capi_destroy_agent = unsafe { __library.get(b"nixl_capi_destroy_agent\0") }.map(|sym| *sym);
        let nixl_capi_get_plugin_params =
            unsafe { __library.get(b"nixl_capi_get_plugin_params\0") }.map(|sym| *sym);
        let nixl_capi_destroy_mem_list =
            unsafe { __library.get(b"nixl_capi_destroy_mem_list\0") }.map(|sym| *sym);
        let nixl_capi_destroy_params =
            unsafe { __library.get(b"nixl_capi_destroy_params\0") }.map(|sym| *sym);
        let nixl_capi_create_backend =
            unsafe { __library.get(b"nixl_capi_create_backend\0") }.map(|sym| *sym);
        let nixl_capi_destroy_backend =
            unsafe { __library.get(b"nixl_capi_destroy_backend\0") }.map(|sym| *sym);
        let nixl_capi_create_reg_dlist =
            unsafe { __library.get(b"nixl_capi_create_reg_dlist\0") }.map(|sym| *sym);
        let nixl_capi_destroy_reg_dlist =
            unsafe { __library.get(b"nixl_capi_destroy_reg_dlist\0") }.map(|sym| *sym);
        let nixl_capi_reg_dlist_add_desc =
            unsafe { __library.get(b"nixl_capi_reg_dlist_add_desc\0") }.map(|sym| *sym);
        let nixl_capi_register_mem = unsafe { __library.get(b"nixl_capi_register_mem\0") }.map(|sym| *sym);
        let nixl_capi_deregister_mem =
            unsafe { __library.get(b"nixl_capi_deregister_mem\0") }.map(|sym| *sym);
        let nixl_capi_get_local_md = unsafe { __library.get(b"nixl_capi_get_local_md\0") }.map(|sym| *sym);
        let nixl_capi_load_remote_md =
            unsafe { __library.get(b"nixl_capi_load_remote_md\0") }.map(|sym| *sym);
        let nixl_capi_invalidate_remote_md =
            unsafe { __library.get(b"nixl_capi_invalidate_remote_md\0") }.map(|sym| *sym);
        let nixl_capi_create_opt_args =
            unsafe { __library.get(b"nixl_capi_create_opt_args\0") }.map(|sym| *sym);
        let nixl_capi_destroy_opt_args =
            unsafe { __library.get(b"nixl_capi_destroy_opt_args\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_add_backend =
            unsafe { __library.get(b"nixl_capi_opt_args_add_backend\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_set_notif_msg =
            unsafe { __library.get(b"nixl_capi_opt_args_set_notif_msg\0") }.map(|sym| *sym);
        let nixl_capi_opt_args_set_has_notif =
            unsafe { __library.get(b"nixl_capi_opt_args_set_has_notif\0") }.map(|sym| *sym);
        let nixl_capi_create_xfer_dlist =
            unsafe { __library.get(b"nixl_capi_create_xfer_dlist\0") }.map(|sym| *sym);
        let nixl_capi_destroy_xfer_dlist =
            unsafe { __library.get(b"nixl_capi_destroy_xfer_dlist\0") }.map(|sym| *sym);
        let nixl_capi_xfer_dlist_add_desc =
            unsafe { __library.get(b"nixl_capi_xfer_dlist_add_desc\0") }.map(|sym| *sym);
        let nixl_capi_create_xfer_req =
            unsafe { __library.get(b"nixl_capi_create_xfer_req\0") }.map(|sym| *sym);
        let nixl_capi_post_xfer_req = unsafe { __library.get(b"nixl_capi_post_xfer_req\0") }.map(|sym| *sym);
        let nixl_capi_get_xfer_status =
            unsafe { __library.get(b"nixl_capi_get_xfer_status\0") }.map(|sym| *sym);
        let nixl_capi_release_xfer_req =
            unsafe { __library.get(b"nixl_capi_release_xfer_req\0") }.map(|sym| *sym);
        let nixl_capi_destroy_xfer_req =
            unsafe { __library.get(b"nixl_capi_destroy_xfer_req\0") }.map(|sym| *sym);
        let nixl_capi_prep_xfer_dlist =
            unsafe { __library.get(b"nixl_capi_prep_xfer_dlist\0") }.map(|sym| *sym);
        let nixl_capi_release_xfer_dlist_handle =
            unsafe { __library.get(b"nixl_capi_release_xfer_dlist_handle\0") }.map(|sym| *sym);
        let nixl_capi_make_xfer_req = unsafe { __library.get(b"nixl_capi_make_xfer_req\0") }.map(|sym| *sym);
        let nixl_capi_create_notif_map =
            unsafe { __library.get(b"nixl_capi_create_notif_map\0") }.map(|sym| *sym);
        let nixl_capi_destroy_notif_map =
            unsafe { __library.get(b"nixl_capi_destroy_notif_map\0") }.map(|sym| *sym);
        let nixl_capi_get_notifs = unsafe { __library.get(b"nixl_capi_get_notifs\0") }.map(|sym| *sym);
        let nixl_capi_notif_map_size =
            unsafe { __library.get(b"nixl_capi_notif_map_size\0") }.map(|sym| *sym);
        let nixl_capi_notif_map_get_agent_at =
            unsafe { __library.get(b"nixl_capi_notif_map_get_agent_at\0") }.map(|sym| *sym);
        let nixl_capi_notif_map_get_notifs_size =
            unsafe { __library.get(b"nixl_capi_notif_map_get_notifs_size\0") }.map(|sym| *sym);
        let nixl_capi_notif_map_get_notif =
            unsafe { __library.get(b"nixl_capi_notif_map_get_notif\0") }.map(|sym| *sym);
        let nixl_capi_notif_map_clear =
            unsafe { __library.get(b"nixl_capi_notif_map_clear\0") }.map(|sym| *sym);
        Ok(NixlCapi {
            __library,
            nixl_capi_is_stub,
            nixl_capi_create_configured_agent,
            nixl_capi_destroy_agent,
            nixl_capi_get_plugin_params,
            nixl_capi_destroy_mem_list,
            nixl_capi_destroy_params,
            nixl_capi_create_backend,
            nixl_capi_destroy_backend,
            nixl_capi_create_reg_dlist,
            nixl_capi_destroy_reg_dlist,
            nixl_capi_reg_dlist_add_desc,
            nixl_capi_register_mem,
            nixl_capi_deregister_mem,
            nixl_capi_get_local_md,
            nixl_capi_load_remote_md,
            nixl_capi_invalidate_remote_md,
            nixl_capi_create_opt_args,
            nixl_capi_destroy_opt_args,
            nixl_capi_opt_args_add_backend,
            nixl_capi_opt_args_set_notif_msg,
            nixl_capi_opt_args_set_has_notif,
            nixl_capi_create_xfer_dlist,
            nixl_capi_destroy_xfer_dlist,
            nixl_capi_xfer_dlist_add_desc,
            nixl_capi_create_xfer_req,
            nixl_capi_post_xfer_req,
            nixl_capi_get_xfer_status,
            nixl_capi_release_xfer_req,
            nixl_capi_destroy_xfer_req,
            nixl_capi_prep_xfer_dlist,
            nixl_capi_release_xfer_dlist_handle,
            nixl_capi_make_xfer_req,
            nixl_capi_create_notif_map,
            nixl_capi_destroy_notif_map,
            nixl_capi_get_notifs,
            nixl_capi_notif_map_size,
            nixl_capi_notif_map_get_agent_at,
            nixl_capi_notif_map_get_notifs_size,
            nixl_capi_notif_map_get_notif,
            nixl_capi_notif_map_clear,
        })
    }
    pub unsafe fn nixl_capi_is_stub(&self) -> bool {
        unsafe { (self.nixl_capi_is_stub.as_ref().expect("Expected function, got error."))() }
    }
    pub unsafe fn nixl_capi_create_configured_agent(
        &self,
        name: *const ::std::os::raw::c_char,
        cfg: *const nixl_capi_agent_config_t,
        agent: *mut nixl_capi_agent_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_create_configured_agent.as_ref().expect("Expected function, got error."))(
                name, cfg, agent,
            )
        }
    }
    pub unsafe fn nixl_capi_destroy_agent(&self, agent: nixl_capi_agent_t) -> nixl_capi_status_t {
        unsafe { (self.nixl_capi_destroy_agent.as_ref().expect("Expected function, got error."))(agent) }
    }
    pub unsafe fn nixl_capi_get_plugin_params(
        &self,
        agent: nixl_capi_agent_t,
        plugin_name: *const ::std::os::raw::c_char,
        mems: *mut nixl_capi_mem_list_t,
        params: *mut nixl_capi_params_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_get_plugin_params.as_ref().expect("Expected function, got error."))(
                agent,
                plugin_name,
                mems,
                params,
            )
        }
    }
    pub unsafe fn nixl_capi_destroy_mem_list(&self, list: nixl_capi_mem_list_t) -> nixl_capi_status_t {
        unsafe { (self.nixl_capi_destroy_mem_list.as_ref().expect("Expected function, got error."))(list) }
    }
    pub unsafe fn nixl_capi_destroy_params(&self, params: nixl_capi_params_t) -> nixl_capi_status_t {
        unsafe { (self.nixl_capi_destroy_params.as_ref().expect("Expected function, got error."))(params) }
    }
    pub unsafe fn nixl_capi_create_backend(
        &self,
        agent: nixl_capi_agent_t,
        plugin_name: *const ::std::os::raw::c_char,
        params: nixl_capi_params_t,
        backend: *mut nixl_capi_backend_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_create_backend.as_ref().expect("Expected function, got error."))(
                agent,
                plugin_name,
                params,
                backend,
            )
        }
    }
    pub unsafe fn nixl_capi_destroy_backend(&self, backend: nixl_capi_backend_t) -> nixl_capi_status_t {
        unsafe { (self.nixl_capi_destroy_backend.as_ref().expect("Expected function, got error."))(backend) }
    }
    pub unsafe fn nixl_capi_create_reg_dlist(
        &self,
        mem_type: nixl_capi_mem_type_t,
        dlist: *mut nixl_capi_reg_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_create_reg_dlist.as_ref().expect("Expected function, got error."))(
                mem_type, dlist,
            )
        }
    }
    pub unsafe fn nixl_capi_destroy_reg_dlist(&self, dlist: nixl_capi_reg_dlist_t) -> nixl_capi_status_t {
        unsafe { (self.nixl_capi_destroy_reg_dlist.as_ref().expect("Expected function, got error."))(dlist) }
    }
    pub unsafe fn nixl_capi_reg_dlist_add_desc(
        &self,
        dlist: nixl_capi_reg_dlist_t,
        addr: usize,
        len: usize,
        dev_id: u64,
        metadata: *const ::std::os::raw::c_void,
        metadata_len: usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_reg_dlist_add_desc.as_ref().expect("Expected function, got error."))(
                dlist,
                addr,
                len,
                dev_id,
                metadata,
                metadata_len,
            )
        }
    }
    pub unsafe fn nixl_capi_register_mem(
        &self,
        agent: nixl_capi_agent_t,
        dlist: nixl_capi_reg_dlist_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_register_mem.as_ref().expect("Expected function, got error."))(
                agent, dlist, opt_args,
            )
        }
    }
    pub unsafe fn nixl_capi_deregister_mem(
        &self,
        agent: nixl_capi_agent_t,
        dlist: nixl_capi_reg_dlist_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_deregister_mem.as_ref().expect("Expected function, got error."))(
                agent, dlist, opt_args,
            )
        }
    }
    pub unsafe fn nixl_capi_get_local_md(
        &self,
        agent: nixl_capi_agent_t,
        data: *mut *mut ::std::os::raw::c_void,
        len: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_get_local_md.as_ref().expect("Expected function, got error."))(agent, data, len)
        }
    }
    pub unsafe fn nixl_capi_load_remote_md(
        &self,
        agent: nixl_capi_agent_t,
        data: *const ::std::os::raw::c_void,
        len: usize,
        agent_name: *mut *mut ::std::os::raw::c_char,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_load_remote_md.as_ref().expect("Expected function, got error."))(
                agent, data, len, agent_name,
            )
        }
    }
    pub unsafe fn nixl_capi_invalidate_remote_md(
        &self,
        agent: nixl_capi_agent_t,
        remote_agent: *const ::std::os::raw::c_char,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_invalidate_remote_md.as_ref().expect("Expected function, got error."))(
                agent,
                remote_agent,
            )
        }
    }
    pub unsafe fn nixl_capi_create_opt_args(&self, args: *mut nixl_capi_opt_args_t) -> nixl_capi_status_t {
        unsafe { (self.nixl_capi_create_opt_args.as_ref().expect("Expected function, got error."))(args) }
    }
    pub unsafe fn nixl_capi_destroy_opt_args(&self, args: nixl_capi_opt_args_t) -> nixl_capi_status_t {
        unsafe { (self.nixl_capi_destroy_opt_args.as_ref().expect("Expected function, got error."))(args) }
    }
    pub unsafe fn nixl_capi_opt_args_add_backend(
        &self,
        args: nixl_capi_opt_args_t,
        backend: nixl_capi_backend_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_opt_args_add_backend.as_ref().expect("Expected function, got error."))(
                args, backend,
            )
        }
    }
    pub unsafe fn nixl_capi_opt_args_set_notif_msg(
        &self,
        args: nixl_capi_opt_args_t,
        data: *const ::std::os::raw::c_void,
        len: usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_opt_args_set_notif_msg.as_ref().expect("Expected function, got error."))(
                args, data, len,
            )
        }
    }
    pub unsafe fn nixl_capi_opt_args_set_has_notif(
        &self,
        args: nixl_capi_opt_args_t,
        has_notif: bool,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_opt_args_set_has_notif.as_ref().expect("Expected function, got error."))(
                args, has_notif,
            )
        }
    }
    pub unsafe fn nixl_capi_create_xfer_dlist(
        &self,
        mem_type: nixl_capi_mem_type_t,
        dlist: *mut nixl_capi_xfer_dlist_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_create_xfer_dlist.as_ref().expect("Expected function, got error."))(
                mem_type, dlist,
            )
        }
    }
    pub unsafe fn nixl_capi_destroy_xfer_dlist(&self, dlist: nixl_capi_xfer_dlist_t) -> nixl_capi_status_t {
        unsafe { (self.nixl_capi_destroy_xfer_dlist.as_ref().expect("Expected function, got error."))(dlist) }
    }
    pub unsafe fn nixl_capi_xfer_dlist_add_desc(
        &self,
        dlist: nixl_capi_xfer_dlist_t,
        addr: usize,
        len: usize,
        dev_id: u64,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_xfer_dlist_add_desc.as_ref().expect("Expected function, got error."))(
                dlist, addr, len, dev_id,
            )
        }
    }
    pub unsafe fn nixl_capi_create_xfer_req(
        &self,
        agent: nixl_capi_agent_t,
        operation: nixl_capi_xfer_op_t,
        local_descs: nixl_capi_xfer_dlist_t,
        remote_descs: nixl_capi_xfer_dlist_t,
        remote_agent: *const ::std::os::raw::c_char,
        req_hndl: *mut nixl_capi_xfer_req_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_create_xfer_req.as_ref().expect("Expected function, got error."))(
                agent,
                operation,
                local_descs,
                remote_descs,
                remote_agent,
                req_hndl,
                opt_args,
            )
        }
    }
    pub unsafe fn nixl_capi_post_xfer_req(
        &self,
        agent: nixl_capi_agent_t,
        req_hndl: nixl_capi_xfer_req_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_post_xfer_req.as_ref().expect("Expected function, got error."))(
                agent, req_hndl, opt_args,
            )
        }
    }
    pub unsafe fn nixl_capi_get_xfer_status(
        &self,
        agent: nixl_capi_agent_t,
        req_hndl: nixl_capi_xfer_req_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_get_xfer_status.as_ref().expect("Expected function, got error."))(agent, req_hndl)
        }
    }
    pub unsafe fn nixl_capi_release_xfer_req(
        &self,
        agent: nixl_capi_agent_t,
        req: nixl_capi_xfer_req_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_release_xfer_req.as_ref().expect("Expected function, got error."))(agent, req)
        }
    }
    pub unsafe fn nixl_capi_destroy_xfer_req(&self, req: nixl_capi_xfer_req_t) -> nixl_capi_status_t {
        unsafe { (self.nixl_capi_destroy_xfer_req.as_ref().expect("Expected function, got error."))(req) }
    }
    pub unsafe fn nixl_capi_prep_xfer_dlist(
        &self,
        agent: nixl_capi_agent_t,
        agent_name: *const ::std::os::raw::c_char,
        descs: nixl_capi_xfer_dlist_t,
        dlist_hndl: *mut nixl_capi_xfer_dlist_handle_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_prep_xfer_dlist.as_ref().expect("Expected function, got error."))(
                agent, agent_name, descs, dlist_hndl, opt_args,
            )
        }
    }
    pub unsafe fn nixl_capi_release_xfer_dlist_handle(
        &self,
        agent: nixl_capi_agent_t,
        dlist_handle: nixl_capi_xfer_dlist_handle_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_release_xfer_dlist_handle.as_ref().expect("Expected function, got error."))(
                agent,
                dlist_handle,
            )
        }
    }
    pub unsafe fn nixl_capi_make_xfer_req(
        &self,
        agent: nixl_capi_agent_t,
        operation: nixl_capi_xfer_op_t,
        local_descs: nixl_capi_xfer_dlist_handle_t,
        local_indices: *const ::std::os::raw::c_int,
        local_indices_count: usize,
        remote_descs: nixl_capi_xfer_dlist_handle_t,
        remote_indices: *const ::std::os::raw::c_int,
        remote_indices_count: usize,
        req_hndl: *mut nixl_capi_xfer_req_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_make_xfer_req.as_ref().expect("Expected function, got error."))(
                agent,
                operation,
                local_descs,
                local_indices,
                local_indices_count,
                remote_descs,
                remote_indices,
                remote_indices_count,
                req_hndl,
                opt_args,
            )
        }
    }
    pub unsafe fn nixl_capi_create_notif_map(
        &self,
        notif_map: *mut nixl_capi_notif_map_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_create_notif_map.as_ref().expect("Expected function, got error."))(notif_map)
        }
    }
    pub unsafe fn nixl_capi_destroy_notif_map(&self, notif_map: nixl_capi_notif_map_t) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_destroy_notif_map.as_ref().expect("Expected function, got error."))(notif_map)
        }
    }
    pub unsafe fn nixl_capi_get_notifs(
        &self,
        agent: nixl_capi_agent_t,
        notif_map: nixl_capi_notif_map_t,
        opt_args: nixl_capi_opt_args_t,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_get_notifs.as_ref().expect("Expected function, got error."))(
                agent, notif_map, opt_args,
            )
        }
    }
    pub unsafe fn nixl_capi_notif_map_size(
        &self,
        map: nixl_capi_notif_map_t,
        size: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe { (self.nixl_capi_notif_map_size.as_ref().expect("Expected function, got error."))(map, size) }
    }
    pub unsafe fn nixl_capi_notif_map_get_agent_at(
        &self,
        map: nixl_capi_notif_map_t,
        index: usize,
        agent_name: *mut *const ::std::os::raw::c_char,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_notif_map_get_agent_at.as_ref().expect("Expected function, got error."))(
                map, index, agent_name,
            )
        }
    }
    pub unsafe fn nixl_capi_notif_map_get_notifs_size(
        &self,
        map: nixl_capi_notif_map_t,
        agent_name: *const ::std::os::raw::c_char,
        size: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_notif_map_get_notifs_size.as_ref().expect("Expected function, got error."))(
                map, agent_name, size,
            )
        }
    }
    pub unsafe fn nixl_capi_notif_map_get_notif(
        &self,
        map: nixl_capi_notif_map_t,
        agent_name: *const ::std::os::raw::c_char,
        index: usize,
        data: *mut *const ::std::os::raw::c_void,
        len: *mut usize,
    ) -> nixl_capi_status_t {
        unsafe {
            (self.nixl_capi_notif_map_get_notif.as_ref().expect("Expected function, got error."))(
                map, agent_name, index, data, len,
            )
        }
    }
    pub unsafe fn nixl_capi_notif_map_clear(&self, map: nixl_capi_notif_map_t) -> nixl_capi_status_t {
        unsafe { (self.nixl_capi_notif_map_clear.as_ref().expect("Expected function, got error."))(map) }
    }
}
