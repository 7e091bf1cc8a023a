//! `contexts`: shows some of the metadata contexts of a device.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, ContextSet, Device, Error, Facts, FileRange, Kind, LeaseAccess, Op,
    PendingRequest, Request, Result,
};
use blockhaul_catalog::{Layer, LayerKind, Param, ParamKind, ParamValues};

use crate::declared::layer;

/// The layer `contexts`.
pub static CONTEXTS: LayerKind = LayerKind {
    name: "contexts",
    summary: "shows only some metadata contexts of the device, such as one of several dirty bitmaps",
    manual: "`show` names the contexts, with commas between them; a comma in a name is `,,`. Each of them \
must be one of the device. `base:allocation` is always shown.",
    example: r#"
blockhaul serve --layer allocation-depth --layer contexts sample:1M \
  --run 'blockhaul info "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[Param {
        name: "show",
        kind: ParamKind::Text,
        default: Some(BASE_ALLOCATION),
        doc: "Names of contexts.",
    }],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let names = names(args.text("show").unwrap_or_default());
    layer(move |inner| {
        let below = inner.facts();
        if let Some(name) = names.iter().find(|name| !is_there(&below, name)) {
            let text = format!("contexts: {} has no context {name:?}", below.name);
            let remedy = match &below.contexts[..] {
                [] => format!("the only one is {BASE_ALLOCATION}"),
                known => format!("known are {}", known.join(", ")),
            };
            return Err(Error::new(Kind::Usage, text).with_remedy(remedy));
        }
        let is_shown = |name: &String| name == BASE_ALLOCATION || names.contains(name);
        let shown: Vec<usize> =
            (0..below.contexts.len()).filter(|&index| is_shown(&below.contexts[index])).collect();
        if shown.len() == below.contexts.len() {
            return Ok(inner);
        }
        let mut facts = Facts::same(&below);
        facts.contexts = shown.iter().map(|&index| below.contexts[index].clone()).collect();
        Ok(Arc::new(SelectedContexts { inner, facts: Arc::new(facts), shown }))
    })
}

/// Whether a device has a context. Extents of devices without any are emulated.
fn is_there(facts: &Facts, name: &str) -> bool {
    let emulated = !facts.can.contains(Can::EXTENTS) && name == BASE_ALLOCATION;
    emulated || facts.context(name).is_some()
}

/// The names in a list, in which `,,` is a comma in a name.
fn names(list: &str) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut letters = list.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            ',' if letters.next_if_eq(&',').is_none() => all.push(String::new()),
            letter => all.last_mut().into_iter().for_each(|name| name.push(letter)),
        }
    }
    all.retain(|name| !name.is_empty());
    all
}

struct SelectedContexts {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    /// The index of each context at the device below, in ascending order.
    shown: Vec<usize>,
}

impl Device for SelectedContexts {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, mut request: Request) -> PendingRequest {
        if let Op::Extents(contexts) = request.op {
            let below = contexts.iter().filter_map(|index| self.shown.get(index).copied());
            request.op = Op::Extents(below.fold(ContextSet::empty(), ContextSet::with));
        }
        self.inner.submit(request)
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}

#[cfg(test)]
mod tests {
    use super::names;

    #[test]
    fn a_doubled_comma_is_part_of_a_name() {
        assert_eq!(names("a:b,c"), ["a:b", "c"]);
        assert_eq!(names("a,,b,c,,"), ["a,b", "c,"]);
        assert_eq!(names("a,"), ["a"]);
        assert!(names("").is_empty());
    }
}
