//! Images written in place.
//!
//! # Order of writes
//! Changes of tables stay in memory until a flush, or until there are too many. What is in the file
//! is then right after a power cut at any write, but for clusters that nothing refers to:
//!
//! 1. Data, copied data and new tables are written when a request arrives, to clusters to which
//!    nothing in the file refers.
//! 2. A flush first writes the refcounts of all clusters that were allocated
//!    ([`Early`](super::cache::WriteStage)), and flushes the files.
//! 3. Then it writes the entries that refer to these clusters ([`Late`](super::cache::WriteStage)), and
//!    flushes again.
//! 4. What these entries referred to before has one reference less from then on. Its clusters are
//!    used again only now, when also no request is left that may have found them in an entry.
//!
//! Refcount blocks and tables are made at once, each behind a flush of its own: they are rare.
//!
//! # Locks
//! A request that changes entries locks its clusters of the disk (`clusters`), then, for a moment,
//! the L2 table that it needs (`tables`) and the refcounts (`allocating`). Requests that overwrite
//! clusters in place lock nothing.
//!
//! # Compressed data
//! It is packed without gaps into clusters, each of which has a reference from every entry whose data it
//! contains. More data may go to a cluster to which the file refers already: only its refcount has to be
//! written before the new entry. A cluster that loses its last reference takes no more data from then on.
//!
//! `writer` is what handles share. `allocate` finds free clusters, `together` many that lie together, `tables` changes entries, `data` writes and `zero` zeroes,
//! `packed` writes compressed clusters, to which `place` gives places,
//! `flush` carries out the order above, `free` gives clusters back, `cut` those beyond a new end of the
//! disk, and `reserve` allocates before there is data.

mod allocate;
mod cut;
pub(super) mod data;
mod flush;
mod free;
mod packed;
mod place;
mod reserve;
mod tables;
mod together;
mod writer;
pub(super) mod zero;

pub use flush::data_was_lost;
pub(super) use writer::{ImageWriter, refuse_bitmaps};
