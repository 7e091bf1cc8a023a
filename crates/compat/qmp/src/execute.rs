//! Dispatch of commands by their names.

use serde_json::{Value, json};

use crate::commands::{self, Arguments, COMMANDS, needed, switch};
use crate::error::{QmpError, Result};
use crate::events::EVENTS;
use crate::monitor::Monitor;
use crate::query;

impl Monitor {
    /// Carries out a command.
    pub(crate) async fn execute(&self, name: &str, arguments: &Arguments) -> Result<Value> {
        let command = commands::find(COMMANDS, name).ok_or_else(|| {
            let shown = blockhaul_wire::printable(name.as_bytes(), 64);
            QmpError::no_command(format!("The command {shown} has not been found"))
        })?;
        commands::check(command, arguments)?;
        if let Some(answer) = self.query(name) {
            return Ok(answer);
        }
        let _turn = self.turn.lock().await;
        self.change(name, arguments).await?;
        Ok(json!({}))
    }

    /// The answer of a command that changes nothing.
    fn query(&self, name: &str) -> Option<Value> {
        Some(match name {
            "query-block" => self.described_devices(),
            "query-block-exports" => self.described_exports(),
            "query-block-jobs" => self.described_block_jobs(),
            "query-commands" => {
                COMMANDS.iter().map(|command| json!({ "name": command.name })).collect()
            }
            "query-jobs" => self.described_jobs(),
            "query-named-block-nodes" => self.described_nodes(),
            "query-name" => json!({ "name": "blockhaul" }),
            "query-qmp-schema" => commands::schema(EVENTS),
            "query-status" => json!({ "running": true, "status": "running" }),
            "query-tpm" => json!([]),
            "query-version" => query::version(),
            _ => return None,
        })
    }

    async fn change(&self, name: &str, arguments: &Arguments) -> Result<()> {
        let node = needed(arguments, "node");
        let bitmap = needed(arguments, "name");
        match name {
            "block-dirty-bitmap-add" => self.add_bitmap(arguments).await,
            "block-dirty-bitmap-clear" => {
                self.free_bitmap(node, bitmap).await?.clear();
                Ok(())
            }
            "block-dirty-bitmap-enable" | "block-dirty-bitmap-disable" => {
                let enabled = name == "block-dirty-bitmap-enable";
                self.free_bitmap(node, bitmap).await?.enable(enabled);
                Ok(())
            }
            "block-dirty-bitmap-merge" => {
                let (target, from) = self.merged(arguments).await?;
                from.iter().for_each(|other| target.merge(other));
                Ok(())
            }
            "block-dirty-bitmap-remove" => self.remove_bitmap(node, bitmap).await,
            "block-export-add" => self.add_export(arguments).await,
            "block-export-del" => {
                let hard = needed(arguments, "mode") == "hard";
                self.remove_export(needed(arguments, "id"), hard).await
            }
            "blockdev-add" => self.add_node(arguments).await,
            "blockdev-backup" => self.backup(arguments).await,
            "blockdev-del" => self.delete_node(needed(arguments, "node-name")).await,
            "blockdev-mirror" => self.mirror(arguments).await,
            "nbd-server-add" => self.add_old_export(arguments).await,
            "nbd-server-remove" => {
                let hard = needed(arguments, "mode") == "hard";
                self.remove_export(needed(arguments, "name"), hard).await
            }
            "nbd-server-start" => self.start_nbd_server(arguments).await,
            "object-add" => self.add_object(arguments),
            "object-del" => self.delete_object(needed(arguments, "id")),
            "nbd-server-stop" => self.stop_nbd_server().await,
            "qom-set" => self.move_drive(arguments).await,
            "quit" => {
                log::info!("stopping on request of the monitor protocol");
                self.host.stop();
                Ok(())
            }
            "transaction" => self.transaction(arguments).await,
            _ => self.control_any_job(name, arguments).await,
        }
    }

    /// `nbd-server-add`: an export whose identifier is its name.
    async fn add_old_export(&self, arguments: &Arguments) -> Result<()> {
        let device = needed(arguments, "device");
        let name = commands::text(arguments, "name").unwrap_or(device);
        let bitmap = commands::text(arguments, "bitmap");
        let bitmaps: Vec<_> = bitmap.into_iter().map(Value::from).collect();
        let export = json!({
            "type": "nbd",
            "id": name,
            "node-name": device,
            "name": name,
            "description": needed(arguments, "description"),
            "writable": switch(arguments, "writable", false),
            "bitmaps": bitmaps,
        });
        match export.as_object() {
            Some(export) => self.add_export(export).await,
            None => Ok(()),
        }
    }
}
