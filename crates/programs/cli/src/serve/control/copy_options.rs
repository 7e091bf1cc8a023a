//! Options of `copy` in requests: words of its command line.

use std::ffi::OsString;

use blockhaul_control::Refusal;
use blockhaul_transfer::NamedOption;

use crate::args;

/// The options among words of the command line of `copy`, for this command.
///
/// # Errors
/// If a word is no option, or an option has an invalid value.
pub(super) fn named_options(command: &str, words: &[String]) -> Result<Vec<NamedOption>, Refusal> {
    let sides = ["source", "target"].map(String::from);
    let words = words.iter().chain(&sides).map(OsString::from).collect();
    let parsed = args::parse_command::<args::CopyArgs>("copy", words);
    let (_, given) = parsed.map_err(|error| {
        let text = error.render().to_string();
        let text = text.lines().map(str::trim).take_while(|line| !line.is_empty());
        let text = text.collect::<Vec<_>>().join(" ");
        Refusal::usage(format!("{command}: {}", text.trim_start_matches("error: ")))
    })?;
    // There is no progress to be shown.
    let given = given.iter().filter(|given| given.name != "no-progress");
    Ok(given.map(|given| NamedOption::from_texts(&given.name, &given.values)).collect())
}
