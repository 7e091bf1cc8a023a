//! Disks in images of container registries: `oci://REGISTRY/NAME:TAG`.
//!
//! - `backend`: the kind of storage, `device`: the device of a disk, in a temporary file.
//! - `reference`: names of images, `digest`: digests of contents. `manifest`: what an image consists of.
//! - `registry`: requests, `challenge`: what a registry says about credentials, `credentials`: where they are,
//!   `credential_helper`: programs that have them.
//! - `read_progress`: how much of an image is read. `layout`: images in a local directory. `blob`: a blob, in one pass.
//! - `decoder`: packed layers, `tar_scan`: members of a layer, `image_files`: the files of all layers together.

pub(crate) mod backend;
mod blob;
mod challenge;
mod credential_helper;
mod credentials;
mod decoder;
mod device;
mod digest;
mod image_files;
mod layout;
mod manifest;
mod read_progress;
mod reference;
mod registry;
mod tar_scan;
