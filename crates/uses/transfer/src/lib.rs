//! One copy of one disk: from a request, which is plain data, to a report.
//!
//! - A [`CopyRequest`] names two [sides](Endpoint) and [options](TransferOptions). [`CopyRequest::check`] refuses
//!   fields that do not go together.
//! - [`CopyRequest::open`] opens and checks both sides; the target is unchanged. A front end with several copies
//!   takes the steps one by one: [`CopySetup`], [`OpenSource`], [`OpenCopy`].
//! - [`OpenCopy::run`] copies, and returns a [`CopyReport`]. [`CopyControl`] pauses, limits or cancels it.
//! - [`CopySetup::plan`] says what a copy would do, and changes nothing.
//! - A [`TransferError`] is data: its kind, the step, the side, and a remedy. Front ends choose exit statuses.
//!
//! `option_table` has the options by their names, for front ends that read texts.
//! `ranges` reads lists of changes (crate `change-lists`). `journal`, `manifest_file` and `rate_limit` are
//! files beside a copy. [`FileFormat`] tells files that hold a disk in a format of their own. `description` compares and redacts descriptions of devices.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod context;
mod control;
mod description;
mod direct;
mod error;
mod error_map;
mod file_format;
mod journal;
mod layers;
mod manifest_file;
mod open_copy;
mod open_source;
mod option_table;
mod options;
mod pipe;
mod plan;
mod printable;
mod ranges;
mod rate_limit;
mod remedy;
mod report;
mod request;
mod salvage;
mod selection;
mod setup;
mod standard_stream;
mod toml_fault;
mod values;

pub use context::{FollowFuture, Follower, Recorder};
pub use control::{CopyControl, TargetState};
pub use description::{
    file_of, full, is_image, path_of, same, same_place, shown, without_passwords, without_secrets,
};
pub use error::{TransferError, TransferErrorKind, TransferStep, opening_text};
pub use file_format::{
    ChosenDevice, FileFormat, FileUse, FormatChoice, chosen_device, format_warning, name_warning,
    same_extension,
};
pub use journal::{journal_name, remove_journal};
pub use layers::{
    adjustable_layers, layer_kind, make_layers, readonly, sparing_of_queries, writes_below,
};
pub use open_copy::{OpenCopy, Overlap, find_overlap};
pub use open_source::OpenSource;
pub use option_table::{
    NamedOption, OptionRow, OptionValue, OptionValueError, SetList, SetValue, TRANSFER_OPTIONS,
    find_option, number,
};
pub use options::{OptionConflict, TransferOptions};
pub use plan::{CopyPlan, NamedPlan, TargetChange, data_bytes, plans_json, plans_text};
pub use printable::{lines, one_line, one_word, shell_word};
pub use rate_limit::rate_limit;
pub use remedy::kind_remedy;
pub use report::{CopyEnd, CopyReport};
pub use request::{CopyRequest, Endpoint};
pub use selection::unread_manifest;
pub use setup::CopySetup;
pub use standard_stream::{is_heard, takes_writes};
pub use toml_fault::toml_fault;
pub use values::{
    ERROR_ACTION_NAMES, ErrorAction, MULTI_CONN_NAMES, parse_algorithm, parse_direct,
    parse_duration, parse_error_action, parse_multi_conn, parse_queue_size, parse_range,
    parse_request_size, parse_schedule, parse_segment, parse_size, parse_sparse,
};
