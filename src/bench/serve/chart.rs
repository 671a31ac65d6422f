//! Latencies over percentiles as an SVG: one panel each for first token, between deliveries, and whole request.

use anyhow::anyhow;
use plotters::prelude::*;

use super::{Percentiles, Report, Summary};

type Pick = fn(&Summary) -> &Percentiles;

const PANELS: [(&str, Pick); 3] = [
    ("first token, ms", |level| &level.first_token_ms),
    ("between deliveries, ms", |level| &level.inter_token_ms),
    ("whole request, ms", |level| &level.total_ms),
];

/// Distinguishable without red against green.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
];

/// Three panels side by side: first token, time between deliveries, whole request, each over percentiles.
pub fn draw(report: &Report) -> anyhow::Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (1200, 420)).into_drawing_area();
        let failed = |error: &dyn std::fmt::Display| anyhow!("drawing the chart: {error}");
        root.fill(&WHITE).map_err(|error| failed(&error))?;
        for (area, (title, pick)) in root.split_evenly((1, 3)).iter().zip(PANELS) {
            panel(area, title, pick, report).map_err(|error| failed(&error))?;
        }
        root.present().map_err(|error| failed(&error))?;
    }
    Ok(svg)
}

fn panel(
    area: &DrawingArea<SVGBackend, plotters::coord::Shift>,
    title: &str,
    pick: Pick,
    report: &Report,
) -> Result<(), Box<dyn std::error::Error>> {
    let top = report.levels.iter().flat_map(|level| &pick(level).curve).map(|point| point.1).fold(0.001, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..100.0, 0.0..top * 1.05)?;
    chart.configure_mesh().x_desc("percentile").light_line_style(RGBColor(238, 238, 238)).draw()?;
    for (index, level) in report.levels.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let points = pick(level).curve.iter().copied();
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
            .label(level.name.clone())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    chart.configure_series_labels().position(SeriesLabelPosition::UpperLeft).background_style(WHITE.mix(0.8)).draw()?;
    Ok(())
}
