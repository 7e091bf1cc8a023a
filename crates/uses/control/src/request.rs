//! Requests on the control socket.

use std::fmt;
use std::time::Duration;

use serde::ser::Error as _;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::members::{MemberError, RequestMembers};
use crate::values::{
    CopyMode, CopyOptions, DeviceDescription, ErrorPolicy, Seconds, SnapshotFailurePolicy, SyncMode,
};

/// A request: a JSON object with the member `command`, the name of the variant in kebab case, and the
/// members of the variant.
///
/// A member that the command does not have is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
// The derived functions have the form {"job-pause":{"job":1}}. `parse` and `Serialize` make of it the form of
// the protocol: an internal tag would cost the names of members in errors.
#[serde(remote = "Self", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ControlRequest {
    /// Lists the clients.
    Clients,
    /// Lists the exports, with their layers and bitmaps.
    Exports,
    /// Disconnects a client when its requests are answered; the second time, at once.
    Disconnect {
        /// Number of the client, as in the list of clients.
        number: u64,
    },
    /// Changes a parameter of a layer, for new requests and those that wait in the layer.
    Set {
        /// Name of the export.
        export: String,
        /// Name of the layer; `NAME:N` for the nth of this name, counted from the device.
        layer: String,
        /// Name of the parameter.
        name: String,
        /// The new value, in the notation of the layer.
        value: String,
    },
    /// Serves another device, for clients that connect from now on.
    ExportAdd {
        /// Name of the new export: at most 4096 bytes.
        name: String,
        /// Device that is served.
        device: DeviceDescription,
        /// Text that clients see in the list of exports.
        #[serde(default)]
        description: String,
        /// Whether clients can only read.
        #[serde(default)]
        readonly: bool,
        /// Layers over the device, below those of all exports, from the device to the client.
        #[serde(default)]
        layers: Vec<String>,
    },
    /// Stops serving an export, and closes its device.
    ExportRemove {
        /// Name of the export.
        name: String,
        /// Whether to remove an export that clients use: they get ESHUTDOWN.
        #[serde(default)]
        force: bool,
    },
    /// Puts a layer over an export in use.
    LayerAdd(LayerChange),
    /// Removes a layer from an export in use.
    LayerRemove(LayerChange),
    /// Serves an export as it is at this moment, as another export.
    SnapshotAdd(SnapshotRequest),
    /// Adds a dirty bitmap, in which later writes are marked.
    BitmapAdd {
        /// Name of the export.
        export: String,
        /// Name of the new bitmap.
        name: String,
        /// Bytes per bit: a power of two, 512 to 64 MiB.
        #[serde(default = "granularity")]
        granularity: u64,
        /// Maximum time for requests in flight to complete.
        #[serde(default = "barrier")]
        seconds: Seconds,
    },
    /// Removes a dirty bitmap.
    BitmapRemove(BitmapRef),
    /// Makes a dirty bitmap clean.
    BitmapClear(BitmapRef),
    /// Marks writes in a dirty bitmap again.
    BitmapEnable(BitmapRef),
    /// Marks no more writes in a dirty bitmap.
    BitmapDisable(BitmapRef),
    /// Makes dirty in a bitmap what is dirty in others.
    BitmapMerge {
        /// Name of the export.
        export: String,
        /// Name of the bitmap that changes.
        name: String,
        /// Names of the others: at least one.
        from: Vec<String>,
    },
    /// Begins a backup of one or several exports at one moment.
    Backup(BackupRequest),
    /// Begins a mirror of an export.
    Mirror(MirrorRequest),
    /// Lists the jobs.
    Jobs,
    /// Starts no more requests of a job.
    JobPause(JobRef),
    /// Continues a paused job, or a job of an earlier server.
    JobResume {
        /// Number of the job.
        job: u64,
        /// Whether a backup of an earlier server may become the disk of now.
        #[serde(default)]
        new_moment: bool,
    },
    /// Ends a mirror.
    JobComplete {
        /// Number of the job.
        job: u64,
        /// Maximum time that clients wait.
        #[serde(default = "cut_over")]
        seconds: Seconds,
        /// Whether clients move to the target.
        #[serde(default = "yes")]
        switch: bool,
    },
    /// Ends a pending job.
    JobFinalize(JobRef),
    /// Cancels a job, also one of an earlier server.
    JobCancel(JobRef),
    /// Changes the maximum rate of a job.
    JobRate {
        /// Number of the job.
        job: u64,
        /// Bytes per second; 0: no limit.
        rate: u64,
    },
    /// Changes the copy mode of a mirror.
    JobCopyMode {
        /// Number of the job.
        job: u64,
        /// The new mode.
        copy_mode: CopyMode,
    },
    /// Replies when a job has ended.
    JobWait {
        /// Number of the job.
        job: u64,
        /// Whether to reply when a mirror is ready, too.
        #[serde(default)]
        ready: bool,
    },
    /// Reads certificates, keys, revocations and pre-shared keys again.
    Reload,
    /// Prints the metrics.
    Metrics,
    /// Accepts no more clients, and ends the server when the last one has left.
    Drain,
    /// Ends the server.
    Stop,
    /// Waits until the server ends. The reply is the end of the connection.
    Wait,
}

/// A layer that is added or removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerChange {
    /// Name of the export.
    pub export: String,
    /// To add: the layer with its parameters. To remove: its name; `NAME:N` for the nth of this name,
    /// counted from the device.
    pub layer: String,
    /// Maximum time for requests in flight to complete.
    #[serde(default = "barrier")]
    pub seconds: Seconds,
}

/// A dirty bitmap of an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BitmapRef {
    /// Name of the export.
    pub export: String,
    /// Name of the bitmap.
    pub name: String,
}

/// A job of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobRef {
    /// Number of the job, as in the list of jobs.
    pub job: u64,
}

/// A snapshot that is served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// Name of the export.
    pub export: String,
    /// Name of the new export, which shows the snapshot.
    pub name: String,
    /// Whether trim requests of readers free old contents.
    #[serde(default)]
    pub discard: bool,
    /// Dirty bitmap of the export that readers see, as it is at this moment.
    pub bitmap: Option<String>,
    /// Dirty bitmap that begins with the snapshot.
    pub start_bitmap: Option<String>,
    /// How old contents are saved.
    #[serde(default)]
    pub snapshot: SnapshotOptions,
    /// Maximum time for requests in flight to complete.
    #[serde(default = "barrier")]
    pub seconds: Seconds,
}

/// How old contents of an export are saved before clients overwrite them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SnapshotOptions {
    /// Bytes that are saved at a time: a power of two, 4 KiB to 16 MiB.
    pub block: u64,
    /// Maximum number of bytes that are saved; none: no maximum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
    /// Directory for the file with old contents; none: TMPDIR of the server, or /var/tmp.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// Maximum time that a write of a client waits; 0: no limit.
    pub guest_timeout: Seconds,
    /// What fails if old contents cannot be saved, or not in that time.
    pub on_failure: SnapshotFailurePolicy,
}

impl Default for SnapshotOptions {
    fn default() -> SnapshotOptions {
        SnapshotOptions {
            block: 64 << 10,
            max: None,
            directory: None,
            guest_timeout: Seconds(Duration::from_millis(200)),
            on_failure: SnapshotFailurePolicy::Break,
        }
    }
}

/// An export and the target of its backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupTarget {
    /// Name of the export.
    pub export: String,
    /// Device that is written.
    pub target: DeviceDescription,
}

/// A backup of one or several exports at one moment: a job for each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupRequest {
    /// Name of the first export.
    pub export: String,
    /// Device that is written for the first export.
    pub target: DeviceDescription,
    /// The other exports.
    #[serde(default)]
    pub with: Vec<BackupTarget>,
    /// How the data is copied.
    #[serde(default)]
    pub options: CopyOptions,
    /// Dirty bitmap of the exports that shows what is copied. It is clean from the moment of the backup on.
    pub bitmap: Option<String>,
    /// Dirty bitmap that begins with the backup.
    pub start_bitmap: Option<String>,
    /// How old contents are saved.
    #[serde(default)]
    pub snapshot: SnapshotOptions,
    /// Maximum time for requests in flight to complete before the backup begins.
    #[serde(default = "barrier")]
    pub seconds: Seconds,
    /// What a job does when a read of the export fails; none: [`ErrorPolicy::Report`].
    pub on_source_error: Option<ErrorPolicy>,
    /// What a job does when a write to the target fails; none: [`ErrorPolicy::Report`].
    pub on_target_error: Option<ErrorPolicy>,
    /// Whether a job that has copied everything waits for [`ControlRequest::JobFinalize`].
    #[serde(default)]
    pub finalize_by_hand: bool,
}

/// A mirror: a copy of an export that follows what clients write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MirrorRequest {
    /// Name of the export.
    pub export: String,
    /// Device that is written.
    pub target: DeviceDescription,
    /// How the data is copied.
    #[serde(default)]
    pub options: CopyOptions,
    /// Maximum time for requests in flight to complete before the mirror begins.
    #[serde(default = "barrier")]
    pub seconds: Seconds,
    /// Dirty bitmap of the export that shows what is copied first; excludes `sync`. It is clean from then on.
    pub bitmap: Option<String>,
    /// What is copied first; none: [`SyncMode::Full`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sync: Option<SyncMode>,
    /// When the target has what clients write; none: [`CopyMode::Background`].
    pub copy_mode: Option<CopyMode>,
    /// What the job does when a read of the export fails; none: [`ErrorPolicy::Report`].
    pub on_source_error: Option<ErrorPolicy>,
    /// What the job does when a write to the target fails; none: [`ErrorPolicy::Report`].
    pub on_target_error: Option<ErrorPolicy>,
    /// Whether the mirror waits for [`ControlRequest::JobFinalize`] when it was completed.
    #[serde(default)]
    pub finalize_by_hand: bool,
}

/// Granularity of a bitmap in bytes, unless the request has another one.
fn granularity() -> u64 {
    64 << 10
}

/// Maximum time for requests in flight to complete, unless the request has another one.
fn barrier() -> Seconds {
    Seconds(Duration::from_secs(30))
}

/// Maximum time that clients wait when they move, unless the request has another one.
fn cut_over() -> Seconds {
    Seconds(Duration::from_secs(1))
}

fn yes() -> bool {
    true
}

impl ControlRequest {
    /// The request on a line.
    ///
    /// # Errors
    /// The line is not a JSON object with a command, the command is unknown, or a member is missing or
    /// wrong.
    pub fn parse(line: &[u8]) -> Result<ControlRequest, RequestError> {
        let request = serde_json::from_slice(line);
        let Ok(Value::Object(mut members)) = request else { return Err(RequestError::default()) };
        let Some(Value::String(name)) = members.remove("command") else {
            return Err(RequestError::default());
        };
        let command = RequestMembers { name: name.clone(), members };
        ControlRequest::deserialize(command)
            .map_err(|problem| RequestError { command: Some(name), problem: Some(problem) })
    }
}

impl Serialize for ControlRequest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // {"job-pause":{"job":1}} becomes {"command":"job-pause","job":1}.
        let tagged = ControlRequest::serialize(self, serde_json::value::Serializer);
        let (command, mut members) = match tagged.map_err(S::Error::custom)? {
            Value::Object(tagged) => match tagged.into_iter().next() {
                Some((command, Value::Object(members))) => (command.into(), members),
                _ => return Err(S::Error::custom("a request is an object")),
            },
            command => (command, Map::new()),
        };
        members.insert("command".to_string(), command);
        members.serialize(serializer)
    }
}

/// Why a line is no request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RequestError {
    /// None: the line is not an object with a command.
    command: Option<String>,
    problem: Option<MemberError>,
}

impl RequestError {
    /// The name of the command; none if the line has none.
    pub fn command(&self) -> Option<&str> {
        self.command.as_deref()
    }

    /// The member that is missing or wrong, as in `with[0].target`; none if it is the command.
    pub fn member(&self) -> Option<&str> {
        let member = self.problem.as_ref().map(|problem| problem.member.as_str());
        member.filter(|member| !member.is_empty())
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.command, &self.problem) {
            (Some(_), Some(problem)) if problem.member.is_empty() => f.write_str(&problem.text),
            (Some(command), Some(problem)) => write!(f, "{command}: {problem}"),
            _ => f.write_str("a request is one JSON object per line, with a \"command\""),
        }
    }
}

impl std::error::Error for RequestError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for line in [
            r#"{"command":"clients"}"#,
            r#"{"command":"job-cancel","job":18446744073709551615}"#,
            r#"{"command":"export-add","description":"","device":["qemu-nbd","a"],"layers":[],"name":"a","readonly":false}"#,
            r#"{"command":"layer-add","export":"a","layer":"log","seconds":1.5}"#,
            r#"{"bitmap":"b","command":"snapshot-add","discard":true,"export":"a","name":"s","seconds":30.0,"snapshot":{"block":4096,"directory":"/tmp","guest_timeout":0.0,"max":9,"on_failure":"fail"},"start_bitmap":null}"#,
        ] {
            let request = ControlRequest::parse(line.as_bytes()).unwrap();
            assert_eq!(serde_json::to_string(&request).unwrap(), line);
        }
    }

    #[test]
    fn errors_name_the_command_and_the_member() {
        for (line, member, text) in [
            ("[]", None, "a request is one JSON object per line, with a \"command\""),
            (r#"{"command":"job-rate","job":1}"#, Some("rate"), "job-rate: \"rate\" is missing"),
            (
                r#"{"command":"backup","export":"a","target":"b","with":[{"export":"c"}]}"#,
                Some("with[0].target"),
                "backup: \"with[0].target\" is missing",
            ),
            (
                r#"{"command":"backup","export":"a","target":"b","options":["--verify",7]}"#,
                Some("options[1]"),
                "backup: \"options[1]\" is not a string",
            ),
            (
                r#"{"command":"backup","export":"a","target":"b","snapshot":{"blocks":1}}"#,
                Some("snapshot.blocks"),
                "backup: \"snapshot.blocks\" is unknown; known are block, max, directory, \
                 guest_timeout, on_failure",
            ),
            (
                r#"{"command":"mirror","export":"a","target":"b","sync":"half"}"#,
                Some("sync"),
                "mirror: \"sync\" is not one of full, none",
            ),
        ] {
            let error = ControlRequest::parse(line.as_bytes()).unwrap_err();
            assert_eq!((error.member(), error.to_string().as_str()), (member, text), "{line}");
        }
        let error = ControlRequest::parse(br#"{"command":"fly"}"#).unwrap_err();
        assert!(error.to_string().starts_with("unknown command \"fly\"; known are clients, exp"));
    }
}
