//! `object-add` and `object-del`: groups of limits for nodes of driver `throttle`, and I/O threads, which
//! have no effect.

use serde_json::{Map, Value};

use crate::commands::{self, Arguments, needed, number};
use crate::error::{QmpError, Result};
use crate::monitor::Monitor;
use crate::nodes::is_well_formed;
use crate::state::{NodeContents, QomObject};

/// Maximum number of objects.
const OBJECTS_MAX: usize = 1024;

/// The limits of a group, without `x-`, which older properties have.
const LIMITS: &[&str] =
    &["bps-total", "bps-read", "bps-write", "iops-total", "iops-read", "iops-write"];

impl Monitor {
    /// `object-add`.
    pub(crate) fn add_object(&self, arguments: &Arguments) -> Result<()> {
        let id = needed(arguments, "id");
        if !is_well_formed(id) {
            return Err(QmpError::generic("Parameter 'id' expects an identifier"));
        }
        let limits = match needed(arguments, "qom-type") {
            "throttle-group" => Some(limits(arguments)?),
            // Requests run on the workers of the server.
            _ => None,
        };
        let mut state = self.state();
        if state.objects.iter().any(|object| object.id == id) {
            let text =
                format!("attempt to add duplicate property '{id}' to object (type 'container')");
            return Err(QmpError::generic(text));
        }
        if state.objects.len() >= OBJECTS_MAX {
            return Err(QmpError::generic(format!("there are {OBJECTS_MAX} objects already")));
        }
        state.objects.push(QomObject { id: id.to_string(), limits });
        Ok(())
    }

    /// `object-del`.
    pub(crate) fn delete_object(&self, id: &str) -> Result<()> {
        let mut state = self.state();
        let Some(place) = state.objects.iter().position(|object| object.id == id) else {
            return Err(QmpError::generic(format!("object '{id}' not found")));
        };
        let is_used = state.nodes.iter().any(|node| match &node.contents {
            NodeContents::Disk { layers, .. } => layers.iter().any(|layer| is_of(layer, id)),
            _ => false,
        });
        if is_used {
            return Err(QmpError::generic(format!("object '{id}' is in use, can not be deleted")));
        }
        state.objects.remove(place);
        Ok(())
    }

    /// The layer of a node in a group of limits; none if the group has no limit.
    pub(crate) fn throttle(&self, group: &str) -> Result<Option<String>> {
        let state = self.state();
        let object = state.objects.iter().find(|object| object.id == group);
        let Some(limits) = object.and_then(|object| object.limits.as_ref()) else {
            return Err(QmpError::generic(format!("Throttle group '{group}' does not exist")));
        };
        Ok((!limits.is_empty()).then(|| format!("throttle?group={group}{limits}")))
    }
}

/// Whether a layer is of this group.
fn is_of(layer: &str, group: &str) -> bool {
    let rest = layer.strip_prefix("throttle?group=").and_then(|rest| rest.strip_prefix(group));
    rest.is_some_and(|rest| rest.starts_with('&'))
}

/// The options of a layer with these limits, each after a `&`.
fn limits(arguments: &Arguments) -> Result<String> {
    let empty = Map::new();
    let inner = arguments.get("limits").and_then(Value::as_object).unwrap_or(&empty);
    commands::check_limits(inner)?;
    let value = |name: &str| {
        let given = number(inner, name).or_else(|| number(arguments, &format!("x-{name}")));
        given.filter(|&value| value > 0)
    };
    let mut options = String::new();
    for name in LIMITS {
        let max_name = format!("{name}-max");
        let limit = value(name);
        let max = value(&max_name);
        if max.is_some() && max < limit {
            return Err(QmpError::generic(format!("{max_name} cannot be lower than {name}")));
        }
        if max.is_some() && limit.is_none() {
            return Err(QmpError::generic(format!("{max_name} requires {name}")));
        }
        if value(&format!("{name}-max-length")).is_some_and(|length| length > 1) {
            return Err(QmpError::generic(format!("{name}-max-length above 1 is not supported")));
        }
        let given = [(*name, limit), (max_name.as_str(), max)];
        let given = given.iter().filter_map(|(name, value)| value.map(|value| (name, value)));
        options.extend(given.map(|(name, value)| format!("&{name}={value}")));
    }
    for kind in ["bps", "iops"] {
        let is_set = |side: &str| value(&format!("{kind}-{side}")).is_some();
        if is_set("total") && (is_set("read") || is_set("write")) {
            let text = format!("{kind}-total cannot be used with {kind}-read or {kind}-write");
            return Err(QmpError::generic(text));
        }
    }
    // Alone it limits nothing.
    if let Some(size) = value("iops-size").filter(|_| !options.is_empty()) {
        options += &format!("&iops-size={size}");
    }
    Ok(options)
}
