//! What can be opened, and how it is described: backends and layers with their options, the grammar
//! of device names, the registry that opens them, and the exports of a server.
//!
//! - [`Registry`]: all backends and kinds of layers of a program. [`DeviceSpec`]: a device as it was
//!   typed.
//! - [`Backend`], [`LayerKind`], [`GateKind`]: the declaration of a kind of storage, layer or gate.
//!   [`Param`], [`ParamValues`]: options.
//! - [`OpenContext`]: how a device opens those that it consists of. [`ConnectionSettings`]: how devices connect
//!   to servers.
//! - [`Stack`]: an open device with its layers, which opens further handles.
//! - [`Exports`]: what the clients of a server may open. [`Gate`]: admits clients before that.
//! - [`Claims`]: the storages that are open, so that each has one owner.
//! - [`BitmapStore`]: the dirty bitmaps that an image stores.
//! - [`ImageFormat`]: the table of image formats that devices read. [`QemuNode`]: a device as QEMU describes it.
//! - [`Shutdown`]: how any of them stops the server.

#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod adjust;
mod backend;
pub mod brackets;
mod claims;
mod connections;
mod exports;
mod foreign;
mod gate;
mod image_bitmaps;
mod image_format;
mod layer;
mod near;
mod object_list;
mod opening;
mod param;
mod qemu_node;
mod registry;
mod several;
mod shutdown;
mod size;
mod spec;
mod stack;
mod switch;

pub use adjust::AdjustableLayer;
pub use backend::{Backend, BackendTarget, NamePolicy, NameRefused, OpenContext};
pub use claims::{
    Claim, ClaimOwner, Claims, CompositeStorage, StorageId, StorageIds, TargetClaims, Warnings,
};
pub use connections::ConnectionSettings;
pub use exports::{
    ClientCertificate, DeviceSharing, Dismissal, Export, ExportClient, Exports, HandleWrapper,
    ListedExport, SharedDevice, StorageFigure, Visit,
};
pub use gate::{AnyKind, AnyLayer, Gate, GateKind, guarded};
pub use image_bitmaps::{BitmapSlot, BitmapStore, ImageBitmap, ImageBitmaps};
pub use image_format::{ArchivedDisk, IMAGE_FORMATS, ImageFormat};
pub use layer::{Layer, LayerBase, LayerKind};
pub use near::nearest;
pub use object_list::{ObjectEntry, ObjectList};
pub use opening::{
    DirectMode, HandleOpener, Intent, OpenFuture, OpenedDevice, Preparation, RecordFile,
    TargetMaking,
};
pub use param::{Param, ParamKind, ParamValues, parse_options};
pub use qemu_node::{QemuNode, QemuPlace, insert_option, only_options, options_of_json};
pub use registry::Registry;
pub use several::{NamedStorage, NamedStorages};
pub use shutdown::Shutdown;
pub use size::{
    format_size, parse_count, parse_duration, parse_number, parse_rate, parse_size, parse_switch,
    rounded_size, size_parts, unit_bytes,
};
pub use spec::{DeviceSpec, percent_decode, percent_encode, without_login_password};
pub use stack::Stack;
pub use switch::{Barrier, PROVIDED, Switch};
