//! The parts of a pass as bars: measured, and on top of it the floor as a line, for every number of rows of one cell of the grid.

use plotters::prelude::*;

use super::{Part, Report};

const COLORS: [(Part, RGBColor); 5] = [
    (Part::Projections, RGBColor(0, 114, 178)),
    (Part::Attention, RGBColor(213, 94, 0)),
    (Part::Experts, RGBColor(0, 158, 115)),
    (Part::Shared, RGBColor(204, 121, 167)),
    (Part::Head, RGBColor(160, 160, 160)),
];

/// Bars for one request at `prefix` tokens.
///
/// # Errors
/// The drawing backend failed.
pub fn bars(report: &Report, prefix: usize) -> Result<String, String> {
    let cell = |part: Part, rows: usize| {
        report.rows.iter().find(|row| (row.part, row.draft_rows, row.batch, row.prefix) == (part, rows, 1, prefix))
    };
    let mut rows: Vec<usize> = report.rows.iter().filter(|row| row.batch == 1 && row.prefix == prefix).map(|row| row.draft_rows).collect();
    rows.dedup();
    let highest = rows.iter().filter_map(|&rows| cell(Part::Total, rows)).map(|row| row.us).fold(1.0, f64::max) / 1e3;
    let mut svg = String::new();
    {
        let fail = |e: &dyn std::fmt::Display| format!("drawing the rank: {e}");
        let area = SVGBackend::with_string(&mut svg, (960, 520)).into_drawing_area();
        area.fill(&WHITE).map_err(|e| fail(&e))?;
        let title = format!("One rank of {}, {}: one request at {prefix} tokens; line = floor", report.ranks, report.device);
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..rows.len() as f64, 0.0..highest * 1.1)
            .map_err(|e| fail(&e))?;
        let name = |at: &f64| rows.get((*at - 0.5).round() as usize).map_or(String::new(), ToString::to_string);
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(2 * rows.len() + 1)
            .x_label_formatter(&|at| if at.fract() == 0.5 { name(at) } else { String::new() })
            .x_desc("rows verified")
            .y_desc("ms a pass")
            .draw()
            .map_err(|e| fail(&e))?;
        let mut bases = vec![0.0; rows.len()];
        for (part, color) in COLORS {
            let blocks: Vec<_> = rows
                .iter()
                .enumerate()
                .filter_map(|(at, &rows)| {
                    let ms = cell(part, rows)?.us / 1e3;
                    let base = bases[at];
                    bases[at] += ms;
                    Some(Rectangle::new([(at as f64 + 0.2, base), (at as f64 + 0.8, base + ms)], color.filled()))
                })
                .collect();
            let legend = move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], color.filled());
            chart.draw_series(blocks).map_err(|e| fail(&e))?.label(part.name()).legend(legend);
        }
        let floors = rows.iter().enumerate().filter_map(|(at, &rows)| {
            let ms = cell(Part::Total, rows)?.floor_us / 1e3;
            Some(PathElement::new(vec![(at as f64 + 0.1, ms), (at as f64 + 0.9, ms)], BLACK.stroke_width(3)))
        });
        chart.draw_series(floors).map_err(|e| fail(&e))?;
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()
            .map_err(|e| fail(&e))?;
        area.present().map_err(|e| fail(&e))?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::super::Row;
    use super::*;
    use crate::device::cuda::Numerics;

    #[test]
    fn every_part_of_every_cell_is_drawn() {
        let row =
            |draft_rows, part| Row { draft_rows, batch: 1, prefix: 64, part, us: 100.0, bytes: 1, floor_us: 50.0, distinct_experts: 0.0 };
        let parts = COLORS.map(|(part, _)| part).into_iter().chain([Part::Total]);
        let rows = [1, 8].into_iter().flat_map(|rows| parts.clone().map(move |part| row(rows, part))).collect();
        let report = Report {
            device: "a card".into(),
            driver: "CUDA 13.0".into(),
            kernel_sha256: String::new(),
            read_gbps: 1.0,
            numerics: Numerics::Fast,
            ranks: 8,
            layers: 2,
            weight_bytes: 0,
            collectives_left_out: 0,
            rows,
            comparisons: Vec::new(),
            prefill: Vec::new(),
        };
        let svg = bars(&report, 64).unwrap();
        assert_eq!(svg.matches("<rect").count(), 1 + 10 + 5 + 2, "background, bars, legend with its box and border: {svg}");
        assert!(svg.contains("a card") && svg.contains("experts"));
    }
}
