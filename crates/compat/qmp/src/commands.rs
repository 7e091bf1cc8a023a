//! The commands of the monitor protocol and their arguments, as data: arguments are checked by these
//! tables before a command does anything, and `query-commands` and `query-qmp-schema` show them.

use serde_json::{Map, Value, json};

use crate::error::{QmpError, Result};

/// The arguments of a command.
pub type Arguments = Map<String, Value>;

/// Type of an argument.
#[derive(Debug, Clone, Copy)]
pub enum ArgumentType {
    Text,
    Bool,
    Number,
    Object,
    List,
    /// One of these texts.
    Choice(&'static [&'static str]),
    /// A text, an object or null.
    Any,
}

/// An argument.
pub struct Argument {
    pub name: &'static str,
    pub kind: ArgumentType,
    pub required: bool,
}

/// A command.
pub struct QmpCommand {
    pub name: &'static str,
    /// None: those that the driver or the type selects.
    pub arguments: Option<&'static [Argument]>,
}

const fn need(name: &'static str, kind: ArgumentType) -> Argument {
    Argument { name, kind, required: true }
}

const fn may(name: &'static str, kind: ArgumentType) -> Argument {
    Argument { name, kind, required: false }
}

const fn command(name: &'static str, arguments: &'static [Argument]) -> QmpCommand {
    QmpCommand { name, arguments: Some(arguments) }
}

use ArgumentType::{Any, Bool, Choice, List, Number, Object, Text};

const ON_ERROR: ArgumentType = Choice(&["report", "ignore", "enospc", "stop", "auto"]);

/// Arguments of `blockdev-backup`.
const BACKUP: &[Argument] = &[
    may("job-id", Text),
    need("device", Text),
    need("target", Text),
    need("sync", Choice(&["top", "full", "none", "incremental", "bitmap"])),
    may("speed", Number),
    may("bitmap", Text),
    may("bitmap-mode", Choice(&["on-success", "never", "always"])),
    may("compress", Bool),
    may("on-source-error", ON_ERROR),
    may("on-target-error", ON_ERROR),
    may("on-cbw-error", Choice(&["break-guest-write", "break-snapshot"])),
    may("auto-finalize", Bool),
    may("auto-dismiss", Bool),
    may("filter-node-name", Text),
    may("discard-source", Bool),
    may("x-perf", Object),
];

const NODE_AND_NAME: &[Argument] = &[need("node", Text), need("name", Text)];

const BITMAP_ADD: &[Argument] = &[
    need("node", Text),
    need("name", Text),
    may("granularity", Number),
    may("persistent", Bool),
    may("disabled", Bool),
];

const BITMAP_MERGE: &[Argument] =
    &[need("node", Text), need("target", Text), need("bitmaps", List)];

const JOB: &[Argument] = &[need("id", Text)];

const BLOCK_JOB: &[Argument] = &[need("device", Text)];

/// All commands.
pub const COMMANDS: &[QmpCommand] = &[
    command("block-dirty-bitmap-add", BITMAP_ADD),
    command("block-dirty-bitmap-clear", NODE_AND_NAME),
    command("block-dirty-bitmap-disable", NODE_AND_NAME),
    command("block-dirty-bitmap-enable", NODE_AND_NAME),
    command("block-dirty-bitmap-merge", BITMAP_MERGE),
    command("block-dirty-bitmap-remove", NODE_AND_NAME),
    QmpCommand { name: "block-export-add", arguments: None },
    command("block-export-del", &[need("id", Text), may("mode", Choice(&["safe", "hard"]))]),
    command("block-job-cancel", &[need("device", Text), may("force", Bool)]),
    command("block-job-complete", BLOCK_JOB),
    command("block-job-dismiss", JOB),
    command(
        "block-job-change",
        &[
            need("id", Text),
            need("type", Choice(&["mirror"])),
            need("copy-mode", Choice(&["background", "write-blocking"])),
        ],
    ),
    command("block-job-finalize", JOB),
    command("block-job-pause", BLOCK_JOB),
    command("block-job-resume", BLOCK_JOB),
    command("block-job-set-speed", &[need("device", Text), need("speed", Number)]),
    QmpCommand { name: "blockdev-add", arguments: None },
    command("blockdev-backup", BACKUP),
    command("blockdev-del", &[need("node-name", Text)]),
    command(
        "blockdev-mirror",
        &[
            may("job-id", Text),
            need("device", Text),
            need("target", Text),
            may("replaces", Text),
            need("sync", Choice(&["top", "full", "none", "incremental", "bitmap"])),
            may("speed", Number),
            may("granularity", Number),
            may("buf-size", Number),
            may("on-source-error", ON_ERROR),
            may("on-target-error", ON_ERROR),
            may("filter-node-name", Text),
            may("copy-mode", Choice(&["background", "write-blocking"])),
            may("auto-finalize", Bool),
            may("auto-dismiss", Bool),
            may("target-is-zero", Bool),
            may("bitmap", Text),
        ],
    ),
    command("job-cancel", JOB),
    command("job-complete", JOB),
    command("job-dismiss", JOB),
    command("job-finalize", JOB),
    command("job-pause", JOB),
    command("job-resume", JOB),
    command(
        "nbd-server-add",
        &[
            need("device", Text),
            may("name", Text),
            may("description", Text),
            may("writable", Bool),
            may("bitmap", Text),
        ],
    ),
    command("nbd-server-remove", &[need("name", Text), may("mode", Choice(&["safe", "hard"]))]),
    command(
        "nbd-server-start",
        &[
            need("addr", Object),
            may("tls-creds", Text),
            may("tls-authz", Text),
            may("handshake-max-seconds", Number),
            may("max-connections", Number),
        ],
    ),
    command("nbd-server-stop", &[]),
    QmpCommand { name: "object-add", arguments: None },
    command("object-del", &[need("id", Text)]),
    command("qmp_capabilities", &[may("enable", List)]),
    command("qom-set", &[need("path", Text), need("property", Text), need("value", Any)]),
    command("query-block", &[may("flat", Bool)]),
    command("query-block-exports", &[]),
    command("query-block-jobs", &[]),
    command("query-commands", &[]),
    command("query-jobs", &[]),
    command("query-name", &[]),
    command("query-named-block-nodes", &[may("flat", Bool)]),
    command("query-qmp-schema", &[]),
    command("query-status", &[]),
    command("query-tpm", &[]),
    command("query-version", &[]),
    command("quit", &[]),
    command("transaction", &[need("actions", List), may("properties", Object)]),
];

/// The actions of a transaction and their arguments.
pub const ACTIONS: &[QmpCommand] = &[
    command("abort", &[]),
    command("block-dirty-bitmap-add", BITMAP_ADD),
    command("block-dirty-bitmap-clear", NODE_AND_NAME),
    command("block-dirty-bitmap-disable", NODE_AND_NAME),
    command("block-dirty-bitmap-enable", NODE_AND_NAME),
    command("block-dirty-bitmap-merge", BITMAP_MERGE),
    command("block-dirty-bitmap-remove", NODE_AND_NAME),
    command("blockdev-backup", BACKUP),
];

/// Options of every node.
const NODE: &[Argument] = &[
    need("driver", Text),
    may("node-name", Text),
    may("read-only", Bool),
    may("auto-read-only", Bool),
    may("discard", Choice(&["ignore", "unmap"])),
    may("detect-zeroes", Choice(&["off", "on", "unmap"])),
    may("cache", Object),
    may("force-share", Bool),
];

const FILE: &[Argument] = &[
    need("filename", Text),
    may("aio", Choice(&["threads", "native", "io_uring"])),
    may("aio-max-batch", Number),
    may("locking", Choice(&["on", "off", "auto"])),
    may("drop-cache", Bool),
];

/// The drivers of nodes and their own options. Others are refused by name.
pub const DRIVERS: &[QmpCommand] = &[
    command("file", FILE),
    command("host_device", FILE),
    command("null-co", &[may("size", Number), may("latency-ns", Number), may("read-zeroes", Bool)]),
    command(
        "nbd",
        &[
            need("server", Object),
            may("export", Text),
            may("reconnect-delay", Number),
            may("open-timeout", Number),
        ],
    ),
    command("raw", &[need("file", Any), may("offset", Number), may("size", Number)]),
    command("qcow2", &[need("file", Any), may("backing", Any)]),
    command(
        "copy-before-write",
        &[
            need("file", Any),
            need("target", Any),
            may("bitmap", Object),
            may("on-cbw-error", Choice(&["break-guest-write", "break-snapshot"])),
            may("cbw-timeout", Number),
            may("min-cluster-size", Number),
        ],
    ),
    command("snapshot-access", &[need("file", Any)]),
    command("throttle", &[need("file", Any), need("throttle-group", Text)]),
];

/// Options of every object.
const OBJECT: &[Argument] =
    &[need("qom-type", Choice(&["iothread", "throttle-group"])), need("id", Text)];

/// The options of an I/O thread.
const IOTHREAD: &[Argument] = &[
    may("aio-max-batch", Number),
    may("poll-grow", Number),
    may("poll-max-ns", Number),
    may("poll-shrink", Number),
    may("thread-pool-max", Number),
    may("thread-pool-min", Number),
];

/// The limits of a throttle group.
const LIMITS: &[Argument] = &[
    may("bps-read", Number),
    may("bps-read-max", Number),
    may("bps-read-max-length", Number),
    may("bps-total", Number),
    may("bps-total-max", Number),
    may("bps-total-max-length", Number),
    may("bps-write", Number),
    may("bps-write-max", Number),
    may("bps-write-max-length", Number),
    may("iops-read", Number),
    may("iops-read-max", Number),
    may("iops-read-max-length", Number),
    may("iops-size", Number),
    may("iops-total", Number),
    may("iops-total-max", Number),
    may("iops-total-max-length", Number),
    may("iops-write", Number),
    may("iops-write-max", Number),
    may("iops-write-max-length", Number),
];

/// Arguments of `block-export-add` with type `nbd`.
const EXPORT: &[Argument] = &[
    need("type", Choice(&["nbd"])),
    need("id", Text),
    need("node-name", Text),
    may("writable", Bool),
    may("writethrough", Bool),
    may("fixed-iothread", Bool),
    may("iothread", Text),
    may("name", Text),
    may("description", Text),
    may("bitmaps", List),
    may("allocation-depth", Bool),
];

/// The command of this name.
pub fn find<'a>(all: &'a [QmpCommand], name: &str) -> Option<&'a QmpCommand> {
    all.iter().find(|command| command.name == name)
}

/// Refuses unknown, missing and wrong arguments of a command.
pub fn check(command: &QmpCommand, given: &Arguments) -> Result<()> {
    match (command.arguments, command.name) {
        (Some(arguments), _) => check_all(&[arguments], given),
        (None, "block-export-add") => check_all(&[EXPORT], given),
        (None, "object-add") => check_object(given),
        (None, _) => check_node(given),
    }
}

/// Refuses wrong options of an object.
fn check_object(given: &Arguments) -> Result<()> {
    if text(given, "qom-type") != Some("throttle-group") {
        return check_all(&[OBJECT, IOTHREAD], given);
    }
    // The members of `limits` have a name without `x-`.
    let (own, old): (Arguments, Arguments) =
        given.clone().into_iter().partition(|(name, _)| !name.starts_with("x-"));
    check_all(&[OBJECT, &[may("limits", Object)]], &own)?;
    let plain = |name: String| name.strip_prefix("x-").map(String::from).unwrap_or(name);
    check_limits(&old.into_iter().map(|(name, value)| (plain(name), value)).collect())
}

/// Refuses wrong limits of a throttle group.
pub fn check_limits(given: &Arguments) -> Result<()> {
    check_all(&[LIMITS], given)
}

/// Refuses wrong options of a node.
pub fn check_node(given: &Arguments) -> Result<()> {
    let driver = match given.get("driver") {
        None => return Err(missing("driver")),
        Some(driver) => driver.as_str().ok_or_else(|| wrong_type("driver", Text))?,
    };
    let found = find(DRIVERS, driver).and_then(|driver| driver.arguments);
    let own = found.ok_or_else(|| not_accepted("driver", driver))?;
    check_all(&[NODE, own], given)
}

fn check_all(tables: &[&[Argument]], given: &Arguments) -> Result<()> {
    for argument in tables.iter().copied().flatten() {
        match given.get(argument.name) {
            None if argument.required => return Err(missing(argument.name)),
            None => {}
            Some(value) => check_value(argument, value)?,
        }
    }
    let known = |name: &str| tables.iter().copied().flatten().any(|known| known.name == name);
    match given.keys().find(|name| !known(name)) {
        None => Ok(()),
        Some(name) => Err(QmpError::generic(format!("Parameter '{name}' is unexpected"))),
    }
}

fn check_value(argument: &Argument, value: &Value) -> Result<()> {
    let Argument { name, kind, .. } = *argument;
    let fits = match kind {
        Text => value.is_string(),
        Bool => value.is_boolean(),
        Object => value.is_object(),
        List => value.is_array(),
        Any => value.is_string() || value.is_object() || value.is_null(),
        Number if value.as_i64().is_some_and(|number| number < 0) => {
            let text = format!("Parameter '{name}' expects a non-negative value");
            return Err(QmpError::generic(text));
        }
        Number => value.is_u64(),
        Choice(words) => match value.as_str() {
            Some(text) if !words.contains(&text) => return Err(not_accepted(name, text)),
            found => found.is_some(),
        },
    };
    if fits { Ok(()) } else { Err(wrong_type(name, kind)) }
}

fn missing(name: &str) -> QmpError {
    QmpError::generic(format!("Parameter '{name}' is missing"))
}

/// A parameter has none of the values that are known.
pub fn not_accepted(name: &str, value: &str) -> QmpError {
    QmpError::generic(format!("Parameter '{name}' does not accept value '{value}'"))
}

fn wrong_type(name: &str, kind: ArgumentType) -> QmpError {
    let expected = kind.name();
    QmpError::generic(format!("Invalid parameter type for '{name}', expected: {expected}"))
}

impl ArgumentType {
    fn name(self) -> &'static str {
        match self {
            Text | Choice(_) => "string",
            Bool => "boolean",
            Number => "integer",
            Object => "object",
            List => "array",
            Any => "string, object or null",
        }
    }

    /// The name of the type in the schema.
    fn schema(self) -> &'static str {
        match self {
            Text | Choice(_) => "str",
            Bool => "bool",
            Number => "int",
            Object | List | Any => "any",
        }
    }
}

/// An optional text.
pub fn text<'a>(given: &'a Arguments, name: &str) -> Option<&'a str> {
    given.get(name).and_then(Value::as_str)
}

/// A text that was checked to be there.
pub fn needed<'a>(given: &'a Arguments, name: &str) -> &'a str {
    text(given, name).unwrap_or_default()
}

/// An optional list; empty without one.
pub fn list<'a>(given: &'a Arguments, name: &str) -> &'a [Value] {
    given.get(name).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// An optional switch.
pub fn switch(given: &Arguments, name: &str, default: bool) -> bool {
    given.get(name).and_then(Value::as_bool).unwrap_or(default)
}

/// An optional number.
pub fn number(given: &Arguments, name: &str) -> Option<u64> {
    given.get(name).and_then(Value::as_u64)
}

/// For `query-qmp-schema`: commands, their arguments, and events.
pub fn schema(events: &[&str]) -> Value {
    let mut all = vec![
        json!({ "name": "any", "meta-type": "builtin", "json-type": "value" }),
        json!({ "name": "str", "meta-type": "builtin", "json-type": "string" }),
        json!({ "name": "int", "meta-type": "builtin", "json-type": "int" }),
        json!({ "name": "bool", "meta-type": "builtin", "json-type": "boolean" }),
        json!({ "name": "nothing", "meta-type": "object", "members": [] }),
    ];
    for command in COMMANDS {
        let arguments: Vec<&Argument> = match (command.arguments, command.name) {
            (Some(arguments), _) => arguments.iter().collect(),
            (None, "block-export-add") => EXPORT.iter().collect(),
            (None, "object-add") => OBJECT.iter().collect(),
            (None, _) => NODE.iter().collect(),
        };
        let members: Vec<_> = arguments.into_iter().map(member).collect();
        let type_name = format!("arguments of {}", command.name);
        all.push(json!({ "name": type_name, "meta-type": "object", "members": members }));
        all.push(json!({
            "name": command.name, "meta-type": "command", "arg-type": type_name, "ret-type": "any",
            "allow-oob": false,
        }));
    }
    let events =
        events.iter().map(|name| json!({ "name": name, "meta-type": "event", "arg-type": "any" }));
    all.extend(events);
    Value::Array(all)
}

fn member(argument: &Argument) -> Value {
    let mut member = json!({ "name": argument.name, "type": argument.kind.schema() });
    if !argument.required {
        member["default"] = Value::Null;
    }
    member
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(name: &str, given: &Value) -> String {
        let command = find(COMMANDS, name).unwrap();
        check(command, given.as_object().unwrap()).unwrap_err().to_string()
    }

    #[test]
    fn wrong_arguments_are_refused_by_name() {
        let backup = json!({ "device": "a", "target": "b", "sync": "all" });
        assert_eq!(
            refused("blockdev-backup", &backup),
            "Parameter 'sync' does not accept value 'all'"
        );
        assert_eq!(refused("quit", &json!({ "x": 1 })), "Parameter 'x' is unexpected");
        assert_eq!(refused("job-cancel", &json!({})), "Parameter 'id' is missing");
        assert_eq!(
            refused("job-cancel", &json!({ "id": 1 })),
            "Invalid parameter type for 'id', expected: string"
        );
        assert_eq!(
            refused("blockdev-add", &json!({ "driver": "vmdk" })),
            "Parameter 'driver' does not accept value 'vmdk'"
        );
        let speed = json!({ "device": "a", "speed": -1 });
        assert_eq!(
            refused("block-job-set-speed", &speed),
            "Parameter 'speed' expects a non-negative value"
        );
    }

    #[test]
    fn names_are_unique() {
        for table in [COMMANDS, ACTIONS, DRIVERS] {
            for (index, command) in table.iter().enumerate() {
                assert!(!table[..index].iter().any(|other| other.name == command.name));
            }
        }
    }
}
