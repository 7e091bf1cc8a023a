//! Disks behind HTTP servers, in object stores and in registries: `https://…`, `dav(s)://…`, `s3://…`, `gs://…`, `az://…`,
//! `oci://…`.
//!
//! - `http_backend`, `store_backend`: the kinds of storage. `device`: the device of a disk.
//! - `http_object`: a resource of an HTTP server, read by ranges. `http_stream`: one of a server without ranges,
//!   read in one pass. `response`: checks of responses, `service_words`: what their bodies say. `failure`: errors, and
//!   whether a request is repeated.
//! - `dav_entries`: properties of files of a WebDAV server; `dav_list`: its files. `dav_target`: a file that is made or
//!   replaced, `dav_upload`: the request that sends it, `put_body`: its bytes in order.
//! - `store_object`: an object of an object store; `stores`: the stores of the vendors, and their credentials;
//!   `aws_profile`: profiles in files; `store_list`: the objects of a bucket. `store_service`: connections of stores,
//!   `store_failure`: their errors.
//! - `page_blob`: page blobs of Azure, written at random places.
//! - `chunks`: disks whose chunks are objects, written at random places.
//! - `oci`: disks in images of container registries.
//! - `place`: parts of object stores that are folders of files. `rest_place`: servers of restic's REST protocol.
//! - `upload`: an object that is written; `part_buffer`: a part of it; `upload_record`: how far it is, in a file.
//!   `upload_device`: the device of what is written as a whole. `identity`: numbers of remote files.
//! - `client`: connections, TLS and proxies; `crypto`: digests and signatures. `runtime`: the thread that carries out all requests.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss))]
#![cfg_attr(not(test), warn(clippy::cast_possible_wrap, clippy::cast_lossless))]

mod aws_profile;
mod chunks;
mod client;
mod crypto;
mod dav_entries;
mod dav_list;
mod dav_target;
mod dav_upload;
mod device;
mod failure;
mod files;
mod http_backend;
mod http_object;
mod http_stream;
mod identity;
mod oci;
mod page_blob;
mod part_buffer;
mod place;
mod put_body;
mod response;
mod rest_place;
mod runtime;
mod service_words;
mod store_backend;
mod store_failure;
mod store_list;
mod store_object;
mod store_service;
mod stores;
mod upload;
mod upload_device;
mod upload_record;

use std::sync::Arc;
use std::time::Duration;

pub use place::{ObjectPlace, RemotePlace};
pub use rest_place::RestPlace;

use chunks::backend::ChunkBackend;
use http_backend::HttpBackend;
use oci::backend::OciBackend;
use store_backend::StoreBackend;
use store_failure::StoreKind;

/// Time limits of requests to servers.
#[derive(Debug, Clone, Copy)]
pub struct RemoteOptions {
    /// Time for a connection, with the handshake of TLS; zero: none.
    pub connect_timeout: Duration,
    /// Time for a response to begin, and for each 256 KiB of its body; zero: none.
    pub timeout: Duration,
}

/// The kinds of storage of this crate.
pub fn all(options: RemoteOptions) -> Vec<Arc<dyn blockhaul_catalog::Backend>> {
    let store =
        |kind| Arc::new(StoreBackend::new(kind, options)) as Arc<dyn blockhaul_catalog::Backend>;
    let mut all: Vec<_> = [StoreKind::S3, StoreKind::Gcs, StoreKind::Azure].map(store).into();
    all.push(Arc::new(HttpBackend::new(options)));
    all.push(Arc::new(ChunkBackend::new(options)));
    all.push(Arc::new(OciBackend::new(options)));
    all
}
