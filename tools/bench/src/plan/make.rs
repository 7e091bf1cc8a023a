//! From a scenario to a plan: sizes chosen, matrix multiplied out, variables replaced, and what this
//! machine cannot run marked with the reason.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::needs::{absent, unmet};
use super::{
    BenchPaths, CellPlan, ImagePlan, MountPlan, PlanCell, PlanRow, PlanStep, ReadyCondition,
    RunSelection, ScenarioPlan, ServerPlan, commands_of,
};
use crate::metric::Metric;
use crate::scenario::{
    Environment, Scenario, ScenarioCase, ScenarioImage, ScenarioStep, StepCommand,
};
use crate::vars::{VariableScope, VariableValue, Vars};
use blockhaul_measure::{MeasureError, Result};

/// More cells than this are a mistake in a matrix, not a benchmark that anyone waits for.
const CELLS_MAX: usize = 4096;

impl ScenarioPlan {
    /// Works out what is to be done. `seed` is used if neither the choice nor the scenario has one.
    pub fn new(
        name: &str,
        scenario: &Scenario,
        choice: &RunSelection,
        places: &BenchPaths,
        seed: u64,
    ) -> Result<ScenarioPlan> {
        let within = |error: MeasureError| MeasureError::usage(format!("scenario {name}: {error}"));
        let size = if choice.full { &scenario.full } else { &scenario.quick };
        let mut matrix = scenario.matrix.clone();
        matrix.extend(size.matrix.clone());
        let columns: Vec<&Environment> = scenario
            .environment
            .iter()
            .filter(|environment| chosen(&choice.columns, &environment.label))
            .collect();
        let given = [choice.set.clone()];
        let usual =
            [size.variables.clone(), scenario.variables.clone(), built_in(places, scenario)];
        let making = RowBuilder { scenario, choice, places, columns: &columns, given, usual };
        let maps = making.maps(&[]);
        let description =
            VariableScope::new(&maps).text(scenario.description.trim()).map_err(within)?;
        let reference = scenario.reference.as_ref().unwrap_or(&scenario.environment[0].label);
        let mut plan = ScenarioPlan {
            name: name.to_owned(),
            title: scenario.title.clone(),
            description,
            full: choice.full,
            one_size: scenario.has_one_size(),
            rows: Vec::new(),
            columns: columns.iter().map(|column| column.label.clone()).collect(),
            reference: columns.iter().position(|column| column.label == *reference),
            curve: scenario.curve.clone(),
            show: scenario.show.clone(),
            rate_unit: scenario.rate.as_ref().map(|rate| rate.unit.clone()),
            mounts: Vec::new(),
            cells: Vec::new(),
            images: Vec::new(),
            setup: Vec::new(),
            runs: choice.runs.or(size.runs).unwrap_or(scenario.runs).max(1),
            warmup: choice.warmup.or(size.warmup).unwrap_or(scenario.warmup),
            together: scenario.together.max(1),
            timeout: scenario.timeout,
            drop_caches: choice.drop_caches.unwrap_or(scenario.drop_caches),
            seed: choice.seed.or(scenario.seed).unwrap_or(seed),
        };
        if plan.rate_unit.is_some() && !plan.show.contains(&Metric::Rate) {
            plan.show.push(Metric::Rate);
        }
        let points = product(&matrix).map_err(within)?;
        for case in &scenario.case {
            for point in &points {
                making.add_row(&mut plan, case, point).map_err(within)?;
            }
        }
        if plan.cells.is_empty() {
            return Err(within(MeasureError::usage(
                "no cell is left; --row and --column must each be part of a label",
            )));
        }
        Ok(plan)
    }

    /// The file systems that cells from `first` on need.
    fn add_mounts(
        &mut self,
        first: usize,
        scenario: &Scenario,
        places: &BenchPaths,
        scope: &VariableScope<'_>,
    ) -> Result<()> {
        for name in self.cells[first..].iter().flatten().flat_map(|body| &body.mounts) {
            if let (None, Some(mount)) =
                (self.mounts.iter().find(|known| known.name == *name), scenario.mount.get(name))
            {
                self.mounts.push(MountPlan {
                    name: name.clone(),
                    kind: mount.kind.clone(),
                    size: scope.size(&mount.size)?,
                    image: places.disk.join(format!("{name}.img")),
                    folder: crate::mount::folder(places, name),
                });
            }
        }
        Ok(())
    }

    fn add_images(&mut self, images: &[ScenarioImage], scope: &VariableScope<'_>) -> Result<()> {
        for image in images {
            let size = scope.size(&image.size)?;
            let new = ImagePlan {
                path: PathBuf::from(scope.text(&image.path)?),
                size,
                data: image.data.as_ref().map_or(Ok(size), |data| scope.size(data))?,
                run: image.run.as_ref().map_or(Ok(1 << 20), |run| scope.size(run))?,
                seed: image.seed,
            };
            if new.data > new.size || new.run == 0 {
                return Err(MeasureError::usage(format!(
                    "image {}: 'data' must not be larger than 'size', and 'run' not 0",
                    image.path
                )));
            }
            match self.images.iter().find(|known| known.path == new.path) {
                None => self.images.push(new),
                Some(known) if *known == new => {}
                Some(_) => {
                    return Err(MeasureError::usage(format!(
                        "image {}: two rows want different content; put a variable of the matrix \
                         into 'path'",
                        image.path
                    )));
                }
            }
        }
        Ok(())
    }
}

/// What rows are made from.
struct RowBuilder<'a> {
    scenario: &'a Scenario,
    choice: &'a RunSelection,
    places: &'a BenchPaths,
    columns: &'a [&'a Environment],
    /// Variables that win over those of a row.
    given: [Vars; 1],
    /// Variables that those of a row win over, the strongest first.
    usual: [Vars; 3],
}

impl RowBuilder<'_> {
    /// All variables, the strongest first, with `row`'s in their place.
    fn maps(&self, row: &[&Vars]) -> Vec<Vars> {
        let row = row.iter().copied();
        self.given.iter().chain(row).chain(&self.usual).cloned().collect()
    }

    /// Adds a case at a point of the matrix, if it is chosen.
    fn add_row(&self, plan: &mut ScenarioPlan, case: &ScenarioCase, point: &Vars) -> Result<()> {
        let maps = self.maps(&[&case.variables, point]);
        let scope = VariableScope::new(&maps);
        let label = row_label(case, point, &scope)?;
        if !chosen(&self.choice.rows, &label) {
            return Ok(());
        }
        if (plan.rows.len() + 1) * self.columns.len() > CELLS_MAX {
            return Err(too_many());
        }
        let row = self.row(plan, case, point, label.clone(), &scope);
        plan.rows
            .push(row.map_err(|error| MeasureError::usage(format!("case '{label}': {error}")))?);
        Ok(())
    }

    /// Adds the cells of a row, and what they need; gives its heading.
    fn row(
        &self,
        plan: &mut ScenarioPlan,
        case: &ScenarioCase,
        point: &Vars,
        label: String,
        scope: &VariableScope<'_>,
    ) -> Result<PlanRow> {
        let scenario = self.scenario;
        let setup = acts(scenario.setup.iter().chain(&case.setup), scope)?;
        let cannot = self.cannot(plan, case, &setup, scope)?;
        let first = plan.cells.len();
        for column in self.columns {
            plan.cells.push(match &cannot {
                Some(reason) => Err(reason.clone()),
                None => {
                    let maps = self.maps(&[&case.variables, point, &column.variables]);
                    let found =
                        cell(scenario, case, column, self.places, &VariableScope::new(&maps));
                    let within =
                        |e| MeasureError::usage(format!("environment '{}': {e}", column.label));
                    found.map_err(within)?
                }
            });
        }
        if plan.cells[first..].iter().any(|cell| cell.is_ok()) {
            plan.add_images(&scenario.image, scope)?;
            plan.add_mounts(first, scenario, self.places, scope)?;
            for act in setup {
                if !plan.setup.contains(&act) {
                    plan.setup.push(act);
                }
            }
        }
        let variables = case.variables.iter().chain(point);
        let variables = variables.map(|(name, value)| (name.clone(), value.to_string())).collect();
        let curve_at = scenario.curve.as_ref().map(|name| axis(name, scope)).transpose()?;
        let amount = match &scenario.rate {
            Some(rate) => Some(scope.size(&rate.amount)? as f64 / rate.divide as f64),
            None => None,
        };
        Ok(PlanRow { label, variables, unchecked: case.unchecked.clone(), curve_at, amount })
    }

    /// Why no cell of a row can be run here.
    fn cannot(
        &self,
        plan: &ScenarioPlan,
        case: &ScenarioCase,
        setup: &[PlanStep],
        scope: &VariableScope<'_>,
    ) -> Result<Option<String>> {
        for needs in [&self.scenario.needs, &case.needs] {
            if let Some(reason) = unmet(self.scenario, needs, self.places, scope)? {
                return Ok(Some(reason));
            }
        }
        Ok(absent(commands_of(setup), self.places).or_else(|| {
            let root = rustix::process::geteuid().is_root();
            (plan.drop_caches && !root).then(|| "needs root to drop caches".to_owned())
        }))
    }
}

fn built_in(places: &BenchPaths, scenario: &Scenario) -> Vars {
    let text = |path: &Path| VariableValue::Text(path.display().to_string());
    let blockhaul = places.blockhaul.as_deref().unwrap_or(Path::new("blockhaul"));
    let mut vars: Vars = [
        ("scratch", text(&places.scratch)),
        ("disk", text(&places.disk)),
        ("blockhaul", text(blockhaul)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    for name in scenario.mount.keys() {
        vars.insert(format!("mount_{name}"), text(&crate::mount::folder(places, name)));
    }
    vars
}

fn chosen(texts: &[String], label: &str) -> bool {
    texts.is_empty() || texts.iter().any(|text| label.contains(text.as_str()))
}

/// All combinations of the values of all axes; the last axis changes fastest.
fn product(matrix: &BTreeMap<String, Vec<VariableValue>>) -> Result<Vec<Vars>> {
    let mut points = vec![Vars::new()];
    for (axis, values) in matrix {
        if points.len().saturating_mul(values.len()) > CELLS_MAX {
            return Err(too_many());
        }
        points = points
            .iter()
            .flat_map(|point| {
                values.iter().map(|value| {
                    let mut point = point.clone();
                    point.insert(axis.clone(), value.clone());
                    point
                })
            })
            .collect();
    }
    Ok(points)
}

fn too_many() -> MeasureError {
    MeasureError::usage(format!("more than {CELLS_MAX} cells; choose some with --row or --column"))
}

fn row_label(case: &ScenarioCase, point: &Vars, scope: &VariableScope<'_>) -> Result<String> {
    let mut label = scope.text(&case.label)?;
    for (name, value) in point {
        if !case.label.contains(&format!("{{{name}}}")) {
            label.push_str(&format!(", {name} {value}"));
        }
    }
    Ok(label)
}

fn axis(name: &str, scope: &VariableScope<'_>) -> Result<f64> {
    let text = scope.text(&format!("{{{name}}}"))?;
    text.parse().map_err(|_| {
        MeasureError::usage(format!("'curve' is over {name}, whose value '{text}' is not a number"))
    })
}

fn argv(command: &StepCommand, scope: &VariableScope<'_>) -> Result<Vec<String>> {
    match command {
        StepCommand::Shell(line) => Ok(vec!["/bin/sh".into(), "-c".into(), scope.text(line)?]),
        StepCommand::Words(words) => {
            let words = scope.words(words)?;
            if words.first().is_some_and(|program| !program.is_empty()) {
                Ok(words)
            } else {
                Err(MeasureError::usage("a command is empty when its variables are replaced"))
            }
        }
    }
}

fn act(step: &ScenarioStep, scope: &VariableScope<'_>) -> Result<PlanStep> {
    let path = |text: &String| scope.text(text).map(PathBuf::from);
    Ok(match step {
        ScenarioStep::Run(command) => PlanStep::Run(argv(command, scope)?),
        ScenarioStep::Fresh { path: file, size } => PlanStep::Fresh(path(file)?, scope.size(size)?),
        ScenarioStep::Overwrite { path: file, like } => {
            PlanStep::Overwrite(path(file)?, path(like)?)
        }
        ScenarioStep::Remove { path: file } => PlanStep::Remove(path(file)?),
        ScenarioStep::Evict { path: file } => PlanStep::Evict(path(file)?),
        ScenarioStep::Compare { expected, found } => {
            PlanStep::Compare(path(expected)?, path(found)?)
        }
    })
}

fn acts<'a>(
    steps: impl IntoIterator<Item = &'a ScenarioStep>,
    scope: &VariableScope<'_>,
) -> Result<Vec<PlanStep>> {
    steps.into_iter().map(|step| act(step, scope)).collect()
}

/// What one cell runs; an inner error is why it is skipped.
fn cell(
    scenario: &Scenario,
    case: &ScenarioCase,
    environment: &Environment,
    places: &BenchPaths,
    scope: &VariableScope<'_>,
) -> Result<PlanCell> {
    if let Some(labels) = &case.environments
        && !labels.contains(&environment.label)
    {
        return Ok(Err("does not take part".to_owned()));
    }
    if let Some(reason) = unmet(scenario, &environment.needs, places, scope)? {
        return Ok(Err(reason));
    }
    let mut servers = Vec::new();
    // A server of the column may be a client of one of the row.
    for name in case.servers.iter().chain(&environment.servers) {
        servers.push(server(scenario, &scope.text(name)?, scope)?);
    }
    let prepare = scenario.prepare.iter().chain(&case.prepare).chain(&environment.prepare);
    let mounts = [&scenario.needs, &case.needs, &environment.needs];
    let body = CellPlan {
        mounts: mounts.iter().flat_map(|needs| needs.mounts.clone()).collect(),
        prepare: acts(prepare, scope)?,
        servers,
        command: argv(&environment.command, scope)?,
        check: acts(case.check.as_ref().unwrap_or(&scenario.check), scope)?,
    };
    Ok(match absent(body.commands(), places) {
        Some(reason) => Err(reason),
        None => Ok(body),
    })
}

fn server(scenario: &Scenario, name: &str, scope: &VariableScope<'_>) -> Result<ServerPlan> {
    let server = scenario.server.get(name).ok_or_else(|| {
        let known: Vec<&str> = scenario.server.keys().map(String::as_str).collect();
        MeasureError::usage(format!(
            "there is no [server.{name}]; there are: {}",
            if known.is_empty() { "none".to_owned() } else { known.join(", ") }
        ))
    })?;
    let within = |error: MeasureError| MeasureError::usage(format!("[server.{name}]: {error}"));
    let path = |text: &String| scope.text(text).map(PathBuf::from).map_err(within);
    let ready = match (&server.socket, &server.port, &server.exists) {
        (Some(socket), _, _) => ReadyCondition::Socket(path(socket)?),
        (_, Some(port), _) => {
            let port = scope.text(&port.to_string()).map_err(within)?;
            let wrong = || within(MeasureError::usage(format!("'{port}' is no TCP port")));
            ReadyCondition::Port(port.parse().map_err(|_| wrong())?)
        }
        (_, _, Some(file)) => ReadyCondition::Exists(path(file)?),
        (None, None, None) => {
            return Err(within(MeasureError::usage("it does not say when it is ready")));
        }
    };
    let command = argv(&server.command, scope).map_err(within)?;
    Ok(ServerPlan { name: name.to_owned(), command, ready })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places() -> BenchPaths {
        BenchPaths {
            scratch: "/scratch".into(),
            disk: "/disk".into(),
            blockhaul: None,
            search: vec!["/bin".into(), "/usr/bin".into()],
        }
    }

    fn plan(text: &str, choice: &RunSelection) -> Result<ScenarioPlan> {
        ScenarioPlan::new("t", &Scenario::parse("t", text)?, choice, &places(), 1)
    }

    const TEXT: &str = "
        title = 't'
        reference = 'two'
        curve = 'n'
        setup = [['true', '{n}'], ['true', 'same']]
        check = [['test', '-e', '{scratch}/x']]
        [quick.variables]
        level = 'quick'
        [full]
        runs = 9
        variables = { level = 'full' }
        [matrix]
        n = [1, 2]
        [server.one]
        command = ['sleep', '{n}']
        socket = '{scratch}/s'
        [[environment]]
        label = 'one'
        command = ['echo', '{level}', '{flags}', '{own}']
        variables = { own = '{label} one', label = 'nice', flags = [] }
        [[environment]]
        label = 'two'
        command = 'no-such-program'
        [[environment]]
        label = 'three'
        command = ['no-such-program']
        [[case]]
        label = 'case {n}'
        servers = ['one']
        environments = ['one', 'three']
        [[case]]
        label = 'other'
        variables = { flags = ['-a', '{n}'] }";

    #[test]
    fn rows_are_cases_times_matrix() {
        let plan = plan(TEXT, &RunSelection::default()).unwrap();
        let labels: Vec<&str> = plan.rows.iter().map(|row| row.label.as_str()).collect();
        assert_eq!(labels, ["case 1", "case 2", "other, n 1", "other, n 2"]);
        assert_eq!(plan.rows[1].curve_at, Some(2.0));
        assert_eq!((plan.reference, plan.runs, plan.one_size), (Some(1), 5, false));
        let body = plan.cell(2, 0).as_ref().unwrap();
        assert_eq!(body.command, ["echo", "quick", "-a", "1", "nice one"]);
        let body = plan.cell(1, 0).as_ref().unwrap();
        assert_eq!(body.command, ["echo", "quick", "nice one"]);
        assert_eq!(body.servers[0].command, ["sleep", "2"]);
        assert_eq!(body.servers[0].ready, ReadyCondition::Socket("/scratch/s".into()));
        assert_eq!(plan.cell(0, 1), &Err("does not take part".to_owned()));
        assert_eq!(plan.cell(0, 2), &Err("the program no-such-program is not there".to_owned()));
        assert_eq!(plan.setup.len(), 3, "equal steps are carried out once: {:?}", plan.setup);
    }

    #[test]
    fn files_that_are_not_here_leave_a_column_out() {
        let text = "title = 't'
            [[environment]]
            label = 'here'
            command = 'true'
            needs = { files = ['/'] }
            [[environment]]
            label = 'absent'
            command = 'true'
            needs = { files = ['no/such/file.c'] }
            [[case]]
            label = 'row'
            unchecked = 'nothing is done'";
        let plan = plan(text, &RunSelection::default()).unwrap();
        assert!(plan.cell(0, 0).is_ok(), "{:?}", plan.cell(0, 0));
        assert_eq!(plan.cell(0, 1), &Err("there is no no/such/file.c here".to_owned()));
    }

    #[test]
    fn choices_go_before_the_scenario() {
        let set = [("level".to_owned(), VariableValue::Text("mine".into()))].into();
        let choice = RunSelection {
            full: true,
            warmup: Some(0),
            set,
            rows: vec!["other".into()],
            columns: vec!["one".into()],
            ..RunSelection::default()
        };
        let plan = plan(TEXT, &choice).unwrap();
        assert_eq!((plan.runs, plan.warmup, plan.rows.len()), (9, 0, 2));
        assert_eq!((plan.columns.len(), plan.reference), (1, None));
        assert_eq!(plan.cell(0, 0).as_ref().unwrap().command[1], "mine");
    }

    #[test]
    fn errors_name_the_case_and_the_environment() {
        let none = RunSelection { rows: vec!["zzz".into()], ..RunSelection::default() };
        let text = plan(TEXT, &none).unwrap_err().to_string();
        assert!(text.contains("scenario t: no cell is left"), "{text}");
        let text = plan(&TEXT.replace("{level}", "{leval}"), &RunSelection::default());
        let text = text.unwrap_err().to_string();
        assert!(text.contains("case 'case 1': environment 'one': there is no variable"), "{text}");
        let text = plan(&TEXT.replace("['one']", "['won']"), &RunSelection::default());
        let text = text.unwrap_err().to_string();
        assert!(text.contains("there is no [server.won]; there are: one"), "{text}");
        let axis = format!("[{}]", "1, ".repeat(3000));
        let text = plan(&TEXT.replace("[1, 2]", &axis), &RunSelection::default());
        assert!(text.unwrap_err().to_string().contains("more than 4096 cells"));
        let text = plan(&TEXT.replace("[1, 2]", "['x']"), &RunSelection::default());
        let text = text.unwrap_err().to_string();
        assert!(text.contains("'x' is not a number"), "{text}");
    }

    #[test]
    fn images_are_made_once_and_do_not_clash() {
        let image = |path: &str| format!("[[image]]\npath = '{path}'\nsize = '{{n}}M'\n");
        let good = plan(&format!("{TEXT}\n{}", image("{scratch}/{n}")), &RunSelection::default());
        assert_eq!(good.unwrap().images.len(), 2);
        let clash = plan(&format!("{TEXT}\n{}", image("{scratch}/x")), &RunSelection::default());
        let text = clash.unwrap_err().to_string();
        assert!(text.contains("two rows want different content"), "{text}");
    }
}
