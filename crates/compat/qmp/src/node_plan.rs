//! Options of a node as the description of a device. Nothing is opened here.

use blockhaul_catalog::{DeviceSpec, percent_encode};
use blockhaul_io::plain;
use serde_json::{Map, Value};

use crate::commands::{self, Arguments, needed, number, text};
use crate::error::{QmpError, Result};
use crate::monitor::Monitor;
use crate::state::NodeContents;

/// Size of a null-co node without one, as in QEMU.
const NULL_SIZE: u64 = 1 << 30;

/// Deepest nesting of nodes in one command.
const DEPTH_MAX: usize = 8;

/// A node as its options describe it; nothing is opened yet.
pub struct NodePlan {
    pub driver: String,
    pub filename: String,
    pub spec: DeviceSpec,
    pub layers: Vec<String>,
    pub children: Vec<String>,
}

impl Monitor {
    /// The plan of a node with these options, `depth` nodes below the root node.
    pub(crate) fn plan(&self, options: &Arguments, depth: usize) -> Result<NodePlan> {
        if depth > 0 {
            commands::check_node(options)?;
        }
        if depth > DEPTH_MAX {
            return Err(QmpError::generic("nodes are nested too deeply"));
        }
        let driver = needed(options, "driver");
        let mut plan = match driver {
            "file" | "host_device" => file_plan(options)?,
            "null-co" => {
                let size = number(options, "size").unwrap_or(NULL_SIZE);
                simple(
                    "null-co://",
                    DeviceSpec::Scheme { scheme: "null".into(), rest: size.to_string() },
                )
            }
            "nbd" => nbd_plan(options)?,
            "raw" => self.raw_plan(options, depth)?,
            "qcow2" => self.qcow2_plan(options, depth)?,
            "throttle" => {
                let layer = self.throttle(needed(options, "throttle-group"))?;
                let mut plan = self.child(options, "file", depth)?;
                plan.layers.extend(layer);
                plan
            }
            _ => return Err(QmpError::generic(format!("driver '{driver}' cannot be used here"))),
        };
        plan.driver = driver.to_string();
        Ok(plan)
    }

    fn raw_plan(&self, options: &Arguments, depth: usize) -> Result<NodePlan> {
        let mut plan = self.child(options, "file", depth)?;
        let offset = number(options, "offset");
        let size = number(options, "size");
        if offset.is_some() || size.is_some() {
            let range = size.map(|size| format!("&range={size}")).unwrap_or_default();
            plan.layers.push(format!("offset?offset={}{range}", offset.unwrap_or(0)));
        }
        Ok(plan)
    }

    fn qcow2_plan(&self, options: &Arguments, depth: usize) -> Result<NodePlan> {
        let mut plan = self.child(options, "file", depth)?;
        if !plan.layers.is_empty() {
            return Err(QmpError::generic("qcow2 over a part of a device is not supported"));
        }
        let names = match options.get("backing") {
            None => "?names=allow".to_string(),
            Some(Value::Null) => "?names=refuse".to_string(),
            Some(_) => {
                let backing = self.child(options, "backing", depth)?;
                if !backing.layers.is_empty() {
                    return Err(QmpError::generic(
                        "a part of a device as backing is not supported",
                    ));
                }
                plan.children.extend(backing.children);
                let backing = backing.spec.to_string();
                let backing = percent_encode(backing.as_bytes());
                format!("?names=allow&backing={backing}")
            }
        };
        let below = plan.spec.to_string().replace('%', "%25").replace('?', "%3f");
        plan.spec = DeviceSpec::Scheme { scheme: "qcow2".into(), rest: below + &names };
        Ok(plan)
    }

    /// The plan of a node below: one that is there already, or in the options.
    fn child(&self, options: &Arguments, role: &str, depth: usize) -> Result<NodePlan> {
        match options.get(role) {
            Some(Value::Object(inner)) => self.plan(inner, depth + 1),
            Some(Value::String(name)) => {
                let node = self.node(name).ok_or_else(|| QmpError::no_node(name))?;
                let NodeContents::Disk { spec, layers } = &node.contents else {
                    let text = format!("Node '{name}' cannot be below a node of this driver");
                    return Err(QmpError::generic(text));
                };
                if self.parent(name).is_some() {
                    return Err(QmpError::generic(format!("Block device {name} is in use")));
                }
                Ok(NodePlan {
                    driver: node.driver.clone(),
                    filename: node.filename.clone(),
                    spec: spec.clone(),
                    layers: layers.clone(),
                    children: vec![name.clone()],
                })
            }
            _ => Err(QmpError::generic(format!("Parameter '{role}' is missing"))),
        }
    }
}

fn simple(filename: &str, spec: DeviceSpec) -> NodePlan {
    NodePlan {
        driver: String::new(),
        filename: filename.to_string(),
        spec,
        layers: Vec::new(),
        children: Vec::new(),
    }
}

fn file_plan(options: &Arguments) -> Result<NodePlan> {
    let path = std::path::absolute(needed(options, "filename"));
    let path = path.map_err(|error| QmpError::generic(plain(&error)))?;
    let shown = path.display().to_string();
    Ok(simple(&shown, DeviceSpec::Path(path)))
}

fn nbd_plan(options: &Arguments) -> Result<NodePlan> {
    let empty = Map::new();
    let server = options.get("server").and_then(Value::as_object).unwrap_or(&empty);
    let export = text(options, "export").unwrap_or_default();
    let escaped = |text: &str| percent_encode(text.as_bytes());
    let uri = match needed(server, "type") {
        "unix" => {
            let socket = escaped(needed(server, "path"));
            format!("nbd+unix:///{}?socket={socket}", escaped(export))
        }
        "inet" => {
            let host = needed(server, "host");
            let port = needed(server, "port");
            let host = if host.contains(':') { format!("[{host}]") } else { host.to_string() };
            format!("nbd://{host}:{port}/{}", escaped(export))
        }
        other => return Err(commands::not_accepted("type", other)),
    };
    let spec = DeviceSpec::parse(uri.as_ref())?;
    Ok(simple(&uri, spec))
}
