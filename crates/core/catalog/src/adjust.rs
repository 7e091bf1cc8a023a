//! Layers whose parameters can be changed while requests are in flight.

use std::sync::{Arc, Mutex};

use crate::{AnyKind, AnyLayer, Gate, Layer, ParamValues, Registry, parse_options};
use blockhaul_block::{Error, Kind, Result};

/// A layer or a gate in use, with changeable parameters.
pub struct AdjustableLayer {
    kind: AnyKind,
    made: AnyLayer,
    /// The typed parameters, initial and changed.
    typed: Mutex<Vec<(String, String)>>,
}

impl AdjustableLayer {
    /// Makes a layer or a gate from `NAME[?key=value&…]`.
    ///
    /// # Errors
    /// Unknown names and wrong values.
    pub fn new(registry: &Registry, text: &str) -> Result<AdjustableLayer> {
        let (name, options) = text.split_once('?').unwrap_or((text, ""));
        let kind = registry.kind(name)?;
        let typed = parse_options(options)?;
        let args = ParamValues::check(name, kind.params(), &typed)?;
        let made = kind.configure(&args, &registry.shutdown)?;
        Ok(AdjustableLayer { kind, made, typed: Mutex::new(typed) })
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.kind.name()
    }

    /// Its kind.
    pub fn kind(&self) -> AnyKind {
        self.kind
    }

    /// The parameters that can be changed.
    pub fn changeable(&self) -> &'static [&'static str] {
        self.kind.changeable()
    }

    /// The layer, if it is one.
    pub fn layer(&self) -> Option<&Arc<dyn Layer>> {
        match &self.made {
            AnyLayer::Layer(layer) => Some(layer),
            AnyLayer::Gate(_) => None,
        }
    }

    /// The gate, if it is one.
    pub fn gate(&self) -> Option<&Arc<dyn Gate>> {
        match &self.made {
            AnyLayer::Gate(gate) => Some(gate),
            AnyLayer::Layer(_) => None,
        }
    }

    /// The parameters that were given, and their values now.
    pub fn values(&self) -> Vec<(String, String)> {
        self.typed.lock().expect("no panic under this lock").clone()
    }

    /// Changes a parameter, for later requests and those waiting in the layer. May wait for
    /// requests in flight, if the layer says so.
    ///
    /// # Errors
    /// Parameters that cannot be changed, and invalid values; then nothing is changed.
    /// Parameters that cannot be changed, and wrong values; then nothing is changed.
    pub fn set(&self, name: &str, value: &str) -> Result<()> {
        let own = self.name();
        let changeable = self.kind.changeable();
        if !changeable.contains(&name) {
            let known = if changeable.is_empty() {
                format!("nothing of the layer {own} can be changed while it runs")
            } else {
                format!(
                    "{own}: {name:?} cannot be changed while it runs; known are {}",
                    changeable.join(", ")
                )
            };
            return Err(Error::new(Kind::Usage, known));
        }
        let changed = {
            let mut typed = self.values();
            typed.retain(|(key, _)| key != name);
            typed.push((name.to_string(), value.to_string()));
            typed
        };
        let args = ParamValues::check(own, self.kind.params(), &changed)?;
        if let Some(layer) = self.layer() {
            layer.change(&args)?;
        }
        *self.typed.lock().expect("no panic under this lock") = changed;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::{LayerKind, Param, ParamKind};
    use blockhaul_block::Device;

    static SPEED: LayerKind = LayerKind {
        name: "speed",
        summary: "",
        manual: "",
        example: "",
        needs_content: false,
        writes_below: true,
        transparent: false,
        params: &[
            Param { name: "speed", kind: ParamKind::Number, default: Some("1"), doc: "" },
            Param { name: "fixed", kind: ParamKind::Number, default: None, doc: "" },
        ],
        changeable: &["speed"],
        configure: |args| Ok(Arc::new(SpeedLayer(args.number("speed").unwrap_or_default().into()))),
    };

    struct SpeedLayer(AtomicU64);

    impl Layer for SpeedLayer {
        fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
            Ok(inner)
        }

        fn change(&self, args: &ParamValues) -> Result<()> {
            match args.number("speed") {
                Some(13) => Err(Error::new(Kind::Usage, "not this one")),
                speed => {
                    self.0.store(speed.unwrap_or_default(), Ordering::Relaxed);
                    Ok(())
                }
            }
        }
    }

    #[test]
    fn what_can_be_changed_is_changed_and_nothing_else() {
        let registry = Registry { layers: vec![&SPEED], ..Registry::default() };
        let layer = AdjustableLayer::new(&registry, "speed?fixed=5").unwrap();
        layer.set("speed", "7").unwrap();
        let values = |pairs: &[(&str, &str)]| -> Vec<_> {
            pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
        };
        assert_eq!(layer.values(), values(&[("fixed", "5"), ("speed", "7")]));
        for (name, value, word) in [
            ("fixed", "6", "known are speed"),
            ("sped", "6", "known are speed"),
            ("speed", "x", "speed: speed:"),
            ("speed", "13", "not this one"),
        ] {
            let error = layer.set(name, value).unwrap_err();
            assert!(error.text().contains(word), "{error}");
        }
        assert_eq!(layer.values(), values(&[("fixed", "5"), ("speed", "7")]));
    }
}
