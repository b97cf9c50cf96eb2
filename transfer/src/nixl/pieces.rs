//! Descriptors prepared once for a whole pool, which requests then name by their places.

use std::ffi::{CStr, c_int};
use std::num::NonZeroU64;
use std::ptr::null_mut;

use super::arguments::DescriptorList;
use super::status::check;
use super::sys::*;
use crate::error::TransferError;
use crate::one_sided::PoolAt;
use crate::transport::Span;

/// A pool of more pieces is not prepared: the library may keep some 40 bytes for each, for every peer.
const MAX_PIECES: u64 = 1 << 20;

/// Describing a span anew costs as much as looking up about this many prepared pieces (some 45 ns).
const PIECES_OF_A_SPAN: u64 = 4;

/// The pieces of one pool, prepared. Must go before the agent, and before the keys of the pool's owner.
pub struct Pieces {
    api: &'static NixlCapi,
    agent: nixl_capi_agent_t,
    raw: nixl_capi_xfer_dlist_handle_t,
}

impl Pieces {
    /// Prepares the whole pieces of `pool`, which the agent `owner` registered (an empty name: we did). `None` for a pool of none
    /// or of more than a million.
    pub fn prepare(
        api: &'static NixlCapi,
        agent: nixl_capi_agent_t,
        owner: &CStr,
        pool: PoolAt,
        piece: NonZeroU64,
    ) -> Result<Option<Self>, TransferError> {
        let count = pool.len / piece;
        if count == 0 || count > MAX_PIECES {
            return Ok(None);
        }
        let pieces = (0..count).map(|index| (pool.base + index * piece.get(), piece.get()));
        let list = DescriptorList::new(api, pool.memory, pieces)?;
        let mut raw = null_mut();
        // SAFETY: agent and list are live, the name is NUL-terminated; the handle, an out parameter, copies the list.
        check("prep_xfer_dlist", unsafe {
            api.nixl_capi_prep_xfer_dlist(agent, owner.as_ptr(), list.raw, &mut raw, null_mut())
        })?;
        Ok(Some(Self { api, agent, raw }))
    }

    /// A request for these pieces, by pairs.
    pub fn request(
        &self,
        op: nixl_capi_xfer_op_t,
        remote: &Self,
        places: &Places,
        options: nixl_capi_opt_args_t,
    ) -> Result<nixl_capi_xfer_req_t, TransferError> {
        let mut raw = null_mut();
        // SAFETY: agent, both handles and options are live; pointers and counts describe the places, which are copied and which
        // the library checks against the lists; `raw` is an out parameter.
        check("make_xfer_req", unsafe {
            self.api.nixl_capi_make_xfer_req(
                self.agent,
                op,
                self.raw,
                places.local.as_ptr(),
                places.local.len(),
                remote.raw,
                places.remote.as_ptr(),
                places.remote.len(),
                &mut raw,
                options,
            )
        })?;
        Ok(raw)
    }
}

// SAFETY: a handle that only the agent's methods use, on whichever thread has the agent.
unsafe impl Send for Pieces {}

impl Drop for Pieces {
    fn drop(&mut self) {
        // SAFETY: made by `prepare`, released once, by an agent that is still live; requests hold copies.
        unsafe { self.api.nixl_capi_release_xfer_dlist_handle(self.agent, self.raw) };
    }
}

/// Which piece goes to which.
#[derive(Debug, PartialEq, Eq)]
pub struct Places {
    local: Vec<c_int>,
    remote: Vec<c_int>,
}

impl Places {
    /// The places of all spans; `None` when one of them is not of whole pieces, or when so many pieces lie next to each other
    /// that naming them takes longer than describing the spans.
    pub fn of(spans: &[Span], piece: NonZeroU64) -> Option<Self> {
        let whole = |bytes: u64| bytes.is_multiple_of(piece.get());
        let pieces = spans.iter().map(|span| span.len / piece).sum::<u64>();
        if pieces > PIECES_OF_A_SPAN * spans.len() as u64
            || !spans.iter().all(|span| whole(span.local) && whole(span.remote) && whole(span.len))
        {
            return None;
        }
        let side = |start: fn(&Span) -> u64| -> Option<Vec<c_int>> {
            let of_span = |span: &Span| {
                let first = start(span) / piece;
                first..first + span.len / piece
            };
            spans.iter().flat_map(of_span).map(|place| c_int::try_from(place).ok()).collect()
        };
        Some(Self { local: side(|span| span.local)?, remote: side(|span| span.remote)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: NonZeroU64 = NonZeroU64::new(8).unwrap();

    #[test]
    fn spans_become_the_places_of_their_pieces_in_order() {
        let spans = [Span { local: 32, remote: 0, len: 16 }, Span { local: 8, remote: 40, len: 8 }];
        let places = Places::of(&spans, PIECE).unwrap();
        assert_eq!(places, Places { local: vec![4, 5, 1], remote: vec![0, 1, 5] });
    }

    #[test]
    fn a_span_that_is_not_of_whole_pieces_has_no_places() {
        let span = Span { local: 32, remote: 0, len: 16 };
        for odd in [Span { local: 4, ..span }, Span { remote: 4, ..span }, Span { len: 4, ..span }] {
            assert_eq!(Places::of(&[span, odd], PIECE), None, "{odd:?}");
        }
    }

    #[test]
    fn a_long_run_of_pieces_is_rather_described_than_named() {
        let span = |pieces: u64| Span { local: 0, remote: 0, len: 8 * pieces };
        assert!(Places::of(&[span(4)], PIECE).is_some());
        assert_eq!(Places::of(&[span(5)], PIECE), None);
        assert!(Places::of(&[span(5), span(3)], PIECE).is_some());
    }

    /// The library counts places with a C int.
    #[test]
    fn a_place_beyond_the_librarys_numbers_is_not_wrapped() {
        let far = Span { local: 8 << 31, remote: 0, len: 8 };
        assert_eq!(Places::of(&[far], PIECE), None);
    }
}
