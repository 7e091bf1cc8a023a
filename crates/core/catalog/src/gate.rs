//! Gates: admit the clients of a server, before its exports.

use std::sync::Arc;

use crate::{Exports, Layer, LayerKind, Param, ParamValues, Shutdown};
use blockhaul_block::Result;

/// A kind of gate, as declared in a [`Registry`](crate::Registry).
pub struct GateKind {
    /// Its name.
    pub name: &'static str,
    /// One line for the help.
    pub summary: &'static str,
    /// Paragraphs for the manual, in Markdown, separated by empty lines; may be empty.
    pub manual: &'static str,
    /// Shell lines that show its use, like [`LayerKind::example`].
    pub example: &'static str,
    /// Its options.
    pub params: &'static [Param],
    /// Makes a gate with these options. It may stop the server through the handle.
    pub configure: fn(&ParamValues, &Shutdown) -> Result<Arc<dyn Gate>>,
}

/// A gate with its options: decides which clients are admitted, what they may open, and when the
/// server ends. Requests do not pass through it.
pub trait Gate: Send + Sync {
    /// Puts the gate before exports. All exports behind the gate share its state (such as the
    /// number of clients).
    ///
    /// # Errors
    /// If the system refuses a resource that the gate needs (a thread).
    fn guard(self: Arc<Self>, exports: Arc<dyn Exports>) -> Result<Arc<dyn Exports>>;
}

/// Puts gates before exports, the last one outermost: it sees a client first.
///
/// # Errors
/// Those of [`Gate::guard`].
pub fn guarded(exports: Arc<dyn Exports>, gates: &[Arc<dyn Gate>]) -> Result<Arc<dyn Exports>> {
    gates.iter().cloned().try_fold(exports, |exports, gate| gate.guard(exports))
}

/// A kind of layer or gate: both use the same option, and share one namespace.
#[derive(Clone, Copy)]
pub enum AnyKind {
    /// A layer, over devices.
    Layer(&'static LayerKind),
    /// A gate, before exports.
    Gate(&'static GateKind),
}

/// A layer or a gate with its options.
#[derive(Clone)]
pub enum AnyLayer {
    /// A layer, over devices.
    Layer(Arc<dyn Layer>),
    /// A gate, before exports.
    Gate(Arc<dyn Gate>),
}

impl AnyKind {
    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            AnyKind::Layer(kind) => kind.name,
            AnyKind::Gate(kind) => kind.name,
        }
    }

    /// One line for the help.
    pub fn summary(&self) -> &'static str {
        match self {
            AnyKind::Layer(kind) => kind.summary,
            AnyKind::Gate(kind) => kind.summary,
        }
    }

    /// Paragraphs for the manual, in Markdown, separated by empty lines; may be empty.
    pub fn manual(&self) -> &'static str {
        match self {
            AnyKind::Layer(kind) => kind.manual,
            AnyKind::Gate(kind) => kind.manual,
        }
    }

    /// Shell lines that show its use.
    pub fn example(&self) -> &'static str {
        match self {
            AnyKind::Layer(kind) => kind.example,
            AnyKind::Gate(kind) => kind.example,
        }
    }

    /// Its options.
    pub fn params(&self) -> &'static [Param] {
        match self {
            AnyKind::Layer(kind) => kind.params,
            AnyKind::Gate(kind) => kind.params,
        }
    }

    /// Its options that can be changed while requests are in flight. A gate has none.
    pub fn changeable(&self) -> &'static [&'static str] {
        match self {
            AnyKind::Layer(kind) => kind.changeable,
            AnyKind::Gate(_) => &[],
        }
    }

    /// Whether it shows a part or a form of existing contents ([`LayerKind::needs_content`]).
    pub fn needs_content(&self) -> bool {
        match self {
            AnyKind::Layer(kind) => kind.needs_content,
            AnyKind::Gate(_) => false,
        }
    }

    /// Whether clients' changes reach what is below ([`LayerKind::writes_below`]).
    pub fn writes_below(&self) -> bool {
        match self {
            AnyKind::Layer(kind) => kind.writes_below,
            AnyKind::Gate(_) => true,
        }
    }

    /// Whether clients see the same data with and without it ([`LayerKind::transparent`]).
    pub fn transparent(&self) -> bool {
        match self {
            AnyKind::Layer(kind) => kind.transparent,
            AnyKind::Gate(_) => false,
        }
    }

    /// Makes one with these options.
    ///
    /// # Errors
    /// [`Kind::Usage`](blockhaul_block::Kind::Usage) if options do not fit together; and errors of
    /// what it needs (a file, a directory).
    pub fn configure(&self, args: &ParamValues, shutdown: &Shutdown) -> Result<AnyLayer> {
        Ok(match self {
            AnyKind::Layer(kind) => AnyLayer::Layer((kind.configure)(args)?),
            AnyKind::Gate(kind) => AnyLayer::Gate((kind.configure)(args, shutdown)?),
        })
    }
}
