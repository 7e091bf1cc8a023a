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
    let failed = |error| Failure::opening("plugin", &args.plugin, &error);
    let mut settings = match args.plugin.strip_prefix("nbdkit:") {
        Some(device) => cabi::Settings::parse(device).map_err(failed)?,
        None => cabi::Settings { plugin: args.plugin.clone(), ..cabi::Settings::default() },
    };
    settings.config.extend(config);
    let text = cabi::dump(&settings).map_err(failed)?;
    out::print(out::lines(&text).as_bytes())?;
    Ok(0)
}
