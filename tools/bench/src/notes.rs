//! What a person must know of a report beside its tables: how it was measured, on what, and what failed.

use crate::metric::Metric;
use crate::result::ScenarioReport;
use crate::run::FAILURES_MAX;

/// What a person must know before looking at figures.
pub fn circumstances(report: &ScenarioReport) -> String {
    let settings = &report.settings;
    let mut text = format!(
        "{} of {} runs after {} for warming up, ± standard deviation; runs of all \
         cells {}, caches {}; {}, {} cores.",
        match (report.one_size, report.full) {
            (true, _) => "Median",
            (false, true) => "Full size; median",
            (false, false) => "Reduced size; median",
        },
        settings.runs,
        settings.warmup,
        match settings.together {
            1 => format!("in random order (seed {})", settings.seed),
            together => format!("from the last to the first, {together} at a time"),
        },
        if settings.drop_caches { "dropped before each run" } else { "kept" },
        report.machine.cpu,
        report.machine.cores,
    );
    if let Some(noise) = report.noise_percent
        && noise > 5.0
    {
        text.push_str(&format!(
            " NOISY: other processes used {noise:.0} % of the processors during the runs."
        ));
    }
    if report.interrupted {
        text.push_str(" STOPPED early: only the measurements until then.");
    }
    text
}

/// Remarks: failures, cells that were skipped, rows that are not checked.
pub fn notes(report: &ScenarioReport) -> Vec<String> {
    let mut notes = Vec::new();
    for cell in &report.cells {
        let place = format!("{}, {}", report.rows[cell.row].label, report.columns[cell.column]);
        if let Some(reason) = &cell.skipped {
            notes.push(format!("Skipped: {place}: {reason}."));
            continue;
        }
        let mut failures = report.runs.iter().filter(|run| {
            (run.row, run.column) == (cell.row, cell.column) && run.failure.is_some()
        });
        let Some(failure) = failures.next().and_then(|run| run.failure.as_ref()) else { continue };
        let count = failures.count() + 1;
        let mut note = format!(
            "Failed: {place}: {count} of {} runs, the first at {}: {}.",
            cell.good.saturating_add(cell.failed.max(count)),
            failure.stage,
            failure.why
        );
        if cell.good == 0 && count >= FAILURES_MAX as usize {
            note.push_str(" It was not repeated.");
        }
        if !failure.stderr.is_empty() {
            note.push_str(&format!(" It printed: {}", failure.stderr.replace('\n', " / ")));
        }
        notes.push(note);
    }
    for row in &report.rows {
        if let Some(reason) = &row.unchecked {
            notes.push(format!("Not checked: {}: {reason}.", row.label));
        }
    }
    let measured = report.cells.iter().any(|cell| cell.good > 0);
    for metric in report.show.iter().filter(|metric| measured && !report.has(**metric)) {
        let why = match metric {
            Metric::ServersCalls => "that takes perf(1), the permission to use it, and --warmup 1",
            _ => "the kernel does not report it here",
        };
        notes.push(format!("Not measured: {}: {why}.", metric.title(report)));
    }
    notes
}

/// What it was measured on and with.
pub fn facts(report: &ScenarioReport) -> Vec<(String, String)> {
    let machine = &report.machine;
    let on = |kind: &Option<String>| kind.clone().unwrap_or_else(|| "unknown".to_owned());
    let mut facts: Vec<(&str, String)> = vec![
        ("scenario", report.name.clone()),
        ("started", report.started.clone()),
        ("processor", format!("{}, {} cores", machine.cpu, machine.cores)),
        ("memory", format!("{} MiB", machine.memory_bytes >> 20)),
        ("kernel", format!("{} ({})", machine.kernel, machine.architecture)),
        ("scratch on", on(&machine.scratch_file_system)),
        ("disk on", on(&machine.disk_file_system)),
        ("load before and after", format!("{} and {}", machine.load_before, report.load_after)),
    ];
    if let Some(noise) = report.noise_percent {
        facts.push(("processors used by others", format!("{noise:.1} % (median over the runs)")));
    }
    if let Some(commit) = &report.commit {
        facts.push(("commit", commit.clone()));
    }
    let programs = report.programs.iter().map(|(name, version)| (name.as_str(), version.clone()));
    facts.extend(programs);
    facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Heading of the table of ratios.
pub fn ratio_title(report: &ScenarioReport) -> String {
    let reference = report.reference.map_or("", |at| report.columns[at].as_str());
    format!("Wall time as a ratio to {reference} in the same round: median and confidence interval")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::report;

    #[test]
    fn only_scenarios_with_sizes_have_one() {
        let mut report = report(&["a"], &[("row", &[&[1.0]])]);
        assert!(circumstances(&report).starts_with("Reduced size; median of 2 runs"));
        report.full = true;
        assert!(circumstances(&report).starts_with("Full size; median of 2 runs"));
        report.one_size = true;
        assert!(circumstances(&report).starts_with("Median of 2 runs"));
    }

    #[test]
    fn what_could_not_be_measured_is_told_with_the_reason() {
        let mut report = report(&["a"], &[("row", &[&[1.0]])]);
        assert_eq!(notes(&report), Vec::<String>::new());
        report.show = vec![Metric::ServersCalls];
        let told = "Not measured: System calls of the servers, thousands: that takes perf(1)";
        assert!(notes(&report)[0].starts_with(told), "{:?}", notes(&report));
    }
}
