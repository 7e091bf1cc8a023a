//! What layers of other crates need, too: declarations of parameters, layers made of functions, state
//! for each disk, memory of their own, requests that are repeated, and the memory of failed flushes.

pub use crate::archive::{BLOCK as TAR_BLOCK, NAME_MAX as TAR_NAME_MAX};
pub use crate::declared::{layer, opened, opened_keeping, param, param_or, usage};
pub use crate::flushes::FlushRecord;
pub use crate::masked::{masked, whole_size};
pub use crate::per_disk::PerDisk;
pub use crate::repeat::RepeatableRequest;
pub use crate::runs::Runs;
pub use crate::scratch::ScratchMemory;
pub use crate::temporary::file as temporary_file;
