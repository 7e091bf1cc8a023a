//! What this machine lacks.

use std::path::Path;

use super::{BenchPaths, base_name};
use crate::scenario::{Scenario, ScenarioNeeds};
use crate::vars::VariableScope;
use blockhaul_measure::Result;

/// Why needs are not met on this machine; None if they are.
pub(super) fn unmet(
    scenario: &Scenario,
    needs: &ScenarioNeeds,
    places: &BenchPaths,
    scope: &VariableScope<'_>,
) -> Result<Option<String>> {
    for program in &needs.programs {
        if places.find(&scope.text(program)?).is_none() {
            return Ok(Some(format!("the program {program} is not there")));
        }
    }
    for file in &needs.files {
        let file = scope.text(file)?;
        if !Path::new(&file).exists() {
            return Ok(Some(format!("there is no {file} here")));
        }
    }
    for mount in needs.mounts.iter().filter_map(|name| scenario.mount.get(name)) {
        if let Some(reason) = crate::mount::unmet(&mount.kind, places) {
            return Ok(Some(reason));
        }
    }
    if needs.root && !rustix::process::geteuid().is_root() {
        return Ok(Some("needs root".to_owned()));
    }
    if let Some(wanted) = &needs.file_system {
        let found = crate::machine::file_system(&places.disk);
        if found.as_deref() != Some(wanted) {
            return Ok(Some(format!(
                "needs {wanted} under --disk, which is on {}",
                found.as_deref().unwrap_or("an unknown file system")
            )));
        }
    }
    let free =
        [(&needs.scratch, &places.scratch, "--scratch"), (&needs.disk, &places.disk, "--disk")];
    for (wanted, place, option) in free {
        let Some(wanted) = wanted else { continue };
        let wanted = scope.size(wanted)?;
        let free = crate::machine::free_bytes(place);
        if free.is_some_and(|free| free < wanted) {
            return Ok(Some(format!(
                "needs {} MiB under {option}, {} are free",
                wanted >> 20,
                free.unwrap_or(0) >> 20
            )));
        }
    }
    Ok(None)
}

/// Tells the first program that is not there, if one is not.
pub(super) fn absent<'a>(
    mut commands: impl Iterator<Item = &'a Vec<String>>,
    places: &BenchPaths,
) -> Option<String> {
    let words = commands.find(|words| places.find(&words[0]).is_none())?;
    Some(format!("the program {} is not there", base_name(&words[0])))
}
