//! `blockhaul plugin`: what a plugin says about itself.

use crate::args;
use crate::exit::{Failure, Outcome};
use crate::{logger, out};

/// Runs `blockhaul plugin`.
pub fn run(args: &args::Plugin) -> Outcome {
    logger::start(false);
    let config = args.config.iter().map(|word| match word.split_once('=') {
        Some((key, value)) => (Some(key.to_string()), value.to_string()),
        None => (None, word.clone()),
    });
    let settings = cabi::Settings {
        plugin: args.plugin.clone(),
        config: config.collect(),
        ..cabi::Settings::default()
    };
    let text =
        cabi::dump(&settings).map_err(|error| Failure::opening("plugin", &args.plugin, &error))?;
    out::print(text.as_bytes())?;
    Ok(0)
}
