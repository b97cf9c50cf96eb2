//! What a request is made from: descriptor lists and options. Requests copy them, so they may go at once.

use std::ptr::null_mut;

use super::status::check;
use super::sys::*;
use crate::error::TransferError;
use crate::transport::Memory;

/// Addresses and lengths in one kind of memory.
pub struct DescriptorList {
    api: &'static NixlCapi,
    pub raw: nixl_capi_xfer_dlist_t,
}

impl DescriptorList {
    pub fn new(
        api: &'static NixlCapi,
        memory: Memory,
        descriptors: impl Iterator<Item = (u64, u64)>,
    ) -> Result<Self, TransferError> {
        let mut raw = null_mut();
        let (kind, device) = kind_of(memory);
        // SAFETY: `raw` is an out parameter.
        check("create_xfer_dlist", unsafe { api.nixl_capi_create_xfer_dlist(kind, &mut raw) })?;
        let list = Self { api, raw };
        for (address, len) in descriptors {
            // SAFETY: the list is live; addresses are stored, not read.
            check("xfer_dlist_add_desc", unsafe {
                api.nixl_capi_xfer_dlist_add_desc(list.raw, address as usize, len as usize, device)
            })?;
        }
        Ok(list)
    }
}

impl Drop for DescriptorList {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once; requests hold copies.
        unsafe { self.api.nixl_capi_destroy_xfer_dlist(self.raw) };
    }
}

/// NIXL's memory type and device number.
pub fn kind_of(memory: Memory) -> (nixl_capi_mem_type_t, u64) {
    match memory {
        Memory::Host => (nixl_capi_mem_type_t::NIXL_CAPI_MEM_DRAM, 0),
        Memory::Cuda(device) => (nixl_capi_mem_type_t::NIXL_CAPI_MEM_VRAM, u64::from(device)),
    }
}

/// Which backend carries a transfer, and the notification after it.
pub struct Options {
    api: &'static NixlCapi,
    pub raw: nixl_capi_opt_args_t,
}

impl Options {
    pub fn new(
        api: &'static NixlCapi,
        backend: nixl_capi_backend_t,
        notification: &[u8],
    ) -> Result<Self, TransferError> {
        let mut raw = null_mut();
        // SAFETY: `raw` is an out parameter.
        check("create_opt_args", unsafe { api.nixl_capi_create_opt_args(&mut raw) })?;
        let options = Self { api, raw };
        // SAFETY: options and backend are live; pointer and length describe `notification`, which is copied.
        unsafe {
            check("opt_args_add_backend", api.nixl_capi_opt_args_add_backend(raw, backend))?;
            let (data, len) = (notification.as_ptr().cast(), notification.len());
            check("opt_args_set_notif_msg", api.nixl_capi_opt_args_set_notif_msg(raw, data, len))?;
            check("opt_args_set_has_notif", api.nixl_capi_opt_args_set_has_notif(raw, true))?;
        }
        Ok(options)
    }
}

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        unsafe { self.api.nixl_capi_destroy_opt_args(self.raw) };
    }
}
