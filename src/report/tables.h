#pragma once
// The tables of a report.
#include "report/analysis.h"
#include "report/table.h"

namespace assay::report {

Table loss_table(const Setting& setting);         // at the end of training, mean and spread over seeds
Table degradation_table(const Setting& setting);  // Δ, by kind of pre-training loss and by domain
Table convergence_table(const Setting& setting);
Table slice_table(const Setting& setting);         // the reference's loss, the others' difference to it
Table slice_detail_table(const Setting& setting);  // by run and domain, for the CSV
Table speed_table(const Setting& setting);
Table probe_table(const Setting& setting);       // what the mixers do with earlier positions; empty without probes
Table differing_table(const Setting& setting);   // size, and every hyper-parameter in which the models differ
Table common_table(const Setting& setting);      // every other hyper-parameter
Table run_table(const Study& study);             // where each number comes from
Table evaluation_table(const Setting& setting);  // every evaluation of every run, for the CSV
Table entropy_table(const Setting& setting);     // of attention, every layer and head of them, for the CSV

}  // namespace assay::report
