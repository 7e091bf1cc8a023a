//! `blockhaul help`: commands and topics.

use std::io::IsTerminal as _;

use crate::exit::{CommandFailure, CommandResult};
use crate::{args, devices, out};

/// Runs `blockhaul help`.
pub fn run(args: &args::HelpArgs) -> CommandResult {
    if let Some(help) = args::help_of(&args.topic) {
        let text = if std::io::stdout().is_terminal() {
            help.ansi().to_string()
        } else {
            help.to_string()
        };
        out::print(args::laid_out(&text).as_bytes())?;
        return Ok(0);
    }
    let text = match &args.topic[..] {
        [topic] => topic_text(topic).or_else(|| devices::device_hint(topic)),
        [kind, name] if kind == "device" || kind == "devices" => {
            devices::device_topic(name).or_else(|| devices::device_hint(name))
        }
        [kind, name] if kind == "layer" || kind == "layers" => devices::layer_topic(name),
        _ => None,
    };
    let Some(text) = text else { return Err(unknown(&args.topic.join(" "))) };
    out::print(text.as_bytes())?;
    Ok(0)
}

fn topic_text(topic: &str) -> Option<String> {
    match topic {
        "devices" | "device" => Some(devices::devices_help()),
        "layers" | "layer" => Some(devices::layers_help()),
        "exit-status" => Some(args::statuses()),
        "job" => Some(args::JOB_FILES.to_string()),
        _ => devices::topic(topic),
    }
}

fn unknown(topic: &str) -> CommandFailure {
    let near = blockhaul_catalog::nearest(topic, devices::topics().into_iter());
    let near = near.map(|near| format!("did you mean {near}? ")).unwrap_or_default();
    CommandFailure::usage(format!(
        "there is no command or topic {topic:?}; {near}topics are devices, layers, the scheme of a \
         device, the name of a layer, exit-status and job"
    ))
}
