//! Facts, maps and contents of disks and NBD servers, as data and as text.
//!
//! ```
//! use blockhaul_catalog::{DeviceSpec, Registry};
//! use blockhaul_client::ConnectOptions;
//! use blockhaul_inspect::{ContentQuery, Inspection};
//! use blockhaul_io::{Runtime, RuntimeConfig};
//!
//! let registry = Registry { backends: blockhaul_backends::all(), ..Registry::default() };
//! let spec = DeviceSpec::parse("memory:64K".as_ref()).unwrap();
//! let inspection = Inspection::new(spec, &[], registry, ConnectOptions::default()).unwrap();
//! let runtime = Runtime::start(&RuntimeConfig::default()).unwrap();
//! let dump = runtime.block_on(|| async move {
//!     assert_eq!(inspection.report(ContentQuery::default()).await.unwrap().size(), 65536);
//!     let device = inspection.device().await.unwrap();
//!     let mut dump = Vec::new();
//!     blockhaul_inspect::write_dump(&device, (0, 16), false, &mut dump).await.unwrap();
//!     dump
//! });
//! assert!(dump.starts_with(b"0000000000: 00 00"));
//! ```
//!
//! - An [`Inspection`] connects to a server, or opens a device. It makes an [`InspectionReport`], which is data, text
//!   and JSON, and which serde serializes. An [`Ability`] is one property in it.
//! - [`write_map`] writes the extents of a device in the formats of nbdinfo and qemu-img, and makes [`MapPictures`].
//! - [`write_objects`] writes the list of the objects of a service.
//! - [`write_dump`] writes contents in hexadecimal, as nbddump does.
//! - [`host_facts`] finds out whether this machine has what devices and commands need.
//! - An [`InspectionError`] is data. Front ends choose exit statuses.
//!
//! Sizes, offsets and lengths are bytes. Futures run on workers of [`blockhaul_io::Runtime`]. Nothing here prints or
//! writes files.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod ability;
mod archive;
mod content;
mod dump;
mod error;
mod file_facts;
mod host;
#[cfg(feature = "formats")]
mod image_report;
mod inspection;
mod json;
mod map;
mod objects;
mod palette;
mod partitions;
mod picture;
mod report;
mod sizes;

pub use ability::Ability;
pub use dump::write_dump;
pub use error::InspectionError;
pub use file_facts::FileFacts;
pub use host::{HostFact, HostState, host_facts};
#[cfg(feature = "formats")]
pub use image_report::{
    bitmaps_json, bitmaps_text, check_json, check_text, image_link_json, image_link_text,
    snapshots_json, snapshots_text,
};
pub use inspection::{ContentQuery, Inspection};
pub use map::{MapContext, MapFormat, MapOptions, MapPictures, write_map};
pub use objects::write_objects;
pub use report::{ExportFacts, ExportOwner, InspectionReport};
